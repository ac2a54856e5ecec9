// A machine as text, and back: one rank measures it, and all plan for the same.
#include <algorithm>

#include "base/json.h"
#include "plan/machine.h"

namespace lm {

std::string machine_json(const Machine& m) {
  Json gpus = Json::array(), disks = Json::array();
  for (const Gpu& gpu : m.gpus) {
    gpus.push_back({gpu.name, gpu.memory_bytes, gpu.bf16_flops, gpu.fp32_flops, gpu.bandwidth, gpu.free_bytes,
                    gpu.link_bandwidth, gpu.processors, gpu.peer_bandwidth});
  }
  for (const Disk& disk : m.disks)
    disks.push_back(
        {disk.path, disk.free_bytes, disk.read_bandwidth, disk.write_bandwidth, disk.both_bandwidth});
  return Json{{"cores", m.cores},
              {"cpu_model", m.cpu_model},
              {"instructions", instructions_name(m.instructions)},
              {"host_memory", m.host_memory},
              {"host_available", m.host_available},
              {"gemm_bf16_flops", m.gemm_bf16_flops},
              {"gemm_fp32_flops", m.gemm_fp32_flops},
              {"gemm_sustained", m.gemm_sustained},
              {"memory_bandwidth", m.memory_bandwidth},
              {"attention_flops", m.attention_flops},
              {"gemm_call_seconds", m.gemm_call_seconds},
              {"decode_bandwidth", m.decode_bandwidth},
              {"host_limit", m.host_limit},
              {"library_bytes", m.library_bytes},
              {"network_bandwidth", m.network_bandwidth},
              {"gpus", gpus},
              {"disks", disks}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

Machine parse_machine(const std::string& text) {
  const Json json = Json::parse(text);
  Machine m;
  m.cores = json.at("cores"), m.cpu_model = json.at("cpu_model");
  m.instructions = instructions_of(json.at("instructions").get<std::string>()).value_or(Instructions::kNone);
  m.host_memory = json.at("host_memory"), m.host_available = json.at("host_available");
  m.gemm_bf16_flops = json.at("gemm_bf16_flops"), m.gemm_fp32_flops = json.at("gemm_fp32_flops");
  m.gemm_sustained = json.at("gemm_sustained"), m.memory_bandwidth = json.at("memory_bandwidth");
  m.attention_flops = json.at("attention_flops");
  m.gemm_call_seconds = json.at("gemm_call_seconds");
  m.decode_bandwidth = json.at("decode_bandwidth");
  m.host_limit = json.at("host_limit"), m.library_bytes = json.at("library_bytes");
  m.network_bandwidth = json.at("network_bandwidth");
  for (const Json& gpu : json.at("gpus"))
    m.gpus.push_back({gpu[0], gpu[1], gpu[2], gpu[3], gpu[4], gpu[5], gpu[6], gpu[7], gpu[8]});
  for (const Json& disk : json.at("disks")) m.disks.push_back({disk[0], disk[1], disk[2], disk[3], disk[4]});
  return m;
}

Machine share_of_machine(const Machine& machine, int ranks) {
  Machine out = machine;
  out.cores = std::max(1, machine.cores / ranks);
  for (int64_t* const bytes : {&out.host_memory, &out.host_available, &out.host_limit}) *bytes /= ranks;
  out.memory_bandwidth /= ranks;
  for (Disk& disk : out.disks) {
    disk.free_bytes /= ranks;
    disk.read_bandwidth /= ranks;
    disk.write_bandwidth /= ranks;
    disk.both_bandwidth /= ranks;
  }
  return out;
}

}  // namespace lm
