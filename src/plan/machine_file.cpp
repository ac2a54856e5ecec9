// A machine as text, and back: one rank measures it, and all plan for the same. Its keys are the members'
// names, and each must be there.
#include "base/json.h"
#include "plan/machine.h"

namespace lm {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ComputeCapability, major, minor)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Gpu, name, memory_bytes, bf16_flops, fp32_flops, bandwidth, free_bytes,
                                   link_bandwidth, processors, peer_bandwidth, capability)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Disk, path, free_bytes, read_bandwidth, write_bandwidth, both_bandwidth)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Machine, cores, cpu_model, instructions, host_memory, host_available,
                                   gemm_bf16_flops, gemm_fp32_flops, gemm_sustained, fastest_flops, libraries,
                                   memory_bandwidth, attention_flops, gemm_call_seconds, decode_bandwidth,
                                   gpus, disks, host_limit, library_bytes, network_bandwidth)

std::string machine_json(const Machine& machine) {
  return Json(machine).dump(-1, ' ', false, Json::error_handler_t::replace);
}

Machine parse_machine(const std::string& text) {
  return Json::parse(text).get<Machine>();
}

}  // namespace lm
