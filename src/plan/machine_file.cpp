// A machine as text, and back: one rank measures it, and all plan for the same; `doctor --json` prints it,
// and `plan --machine` reads it. Its keys are the members' names, and each must be there.
#include <fmt/format.h>
#include <optional>
#include <stdexcept>

#include "base/error.h"
#include "base/json.h"
#include "plan/machine.h"

namespace lm {

static void to_json(Json& json, Instructions instructions) {
  json = instructions_name(instructions);
}

static void from_json(const Json& json, Instructions& instructions) {
  const auto& name = json.get_ref<const std::string&>();
  const std::optional<Instructions> found = instructions_of(name);
  if (!found) throw std::runtime_error("instructions: \"" + name + "\", expected " + instructions_names());
  instructions = *found;
}

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

namespace {

// Counts are `int`, bytes and rates of any machine are far below 10^18.
void check_numbers(const Json& value, const std::string& name) {
  const bool count = name == "cores" || name.ends_with(".processors") || name.ends_with(".major") ||
                     name.ends_with(".minor");
  const double most = count ? 1e6 : 1e18;
  if (value.is_number() && !(value.get<double>() >= 0 && value.get<double>() <= most))
    throw std::runtime_error(fmt::format("{}: {}, expected 0 (not known) to {:g}", name, value.dump(), most));
  for (const auto& [key, inner] : value.items()) {
    if (value.is_structured()) check_numbers(inner, name.empty() ? key : name + "." + key);
  }
}

Machine check_machine(const Json& json) {
  check_numbers(json, "");
  Machine machine = json.get<Machine>();
  if (machine.cores < 1) throw std::runtime_error("cores: 0, expected 1 or more");
  if (machine.host_memory == 0) throw std::runtime_error("host_memory: 0, expected bytes");
  for (const Gpu& gpu : machine.gpus) {
    if (gpu.memory_bytes == 0) throw std::runtime_error("gpus: memory_bytes: 0, expected bytes");
  }
  return machine;
}

}  // namespace

Machine read_machine_file(const std::string& path) {
  const Json file = read_json_file(path);
  const auto fail = [&](const std::string& why) {
    return Error(Exit::kInput, {.area = "FILE-21",
                                .what = "this does not describe a machine: " + why,
                                .place = path,
                                .next = "`lmlaunch doctor --json > machine.json`, on a machine of that kind, "
                                        "with this version of lmlaunch"});
  };
  if (!file.is_object() || !file.contains("machine")) throw fail("there is no \"machine\"");
  try {
    return check_machine(file["machine"]);
  } catch (const nlohmann::detail::exception& error) {
    throw fail(json_reason(error));
  } catch (const std::runtime_error& error) {
    throw fail(error.what());
  }
}

}  // namespace lm
