// <run>/numerics.json: a run's numerics as text, and back.
#include <stdexcept>

#include "base/error.h"
#include "base/json.h"
#include "config/config_names.h"
#include "plan/numerics.h"

namespace lm {
namespace {

constexpr const char* kMasters[] = {"split", "fp32", "none"};

}  // namespace

std::string numerics_json(const NumericsPlan& n) {
  return nlohmann::ordered_json{
      {"dtype", dtype_name(n.dtype)},
      {"trained", dtype_name(n.trained_dtype())},
      {"products", n.products == Products::kTF32 ? "tf32" : "fp32"},
      {"gradients", dtype_name(n.gradient_dtype)},
      {"optimizer", rule_text(n.rule).name},
      {"master", n.trained_dtype() == DType::kF32 ? "weight" : kMasters[static_cast<size_t>(n.master)]},
      {"micro_batch", n.micro_batch},
      {"micro_batches", n.micro_batches},
      {"row_chunk", n.row_chunk},
      {"round_rows", n.round_rows},
      {"recompute", recompute_name(n.recompute)},
      {"threads", n.threads},
      {"documents_at_once", n.documents_at_once},
      {"kernel_set", n.kernel_set},
      {"libraries", n.libraries},
      {"ranks", n.ranks},
      {"machine_ranks", n.machine_ranks}}
      .dump(2, ' ', false, Json::error_handler_t::replace);
}

NumericsPlan parse_numerics(const std::string& text, const std::string& place) {
  try {
    const Json json = parse_json(text, place, {.bytes = 1 << 16, .depth = 4});
    const auto count = [&](const char* key, int64_t most) {
      const int64_t value = json_integer(json.at(key));
      if (value < 1 || value > most) throw std::runtime_error(std::string(key) + " is out of range");
      return value;
    };
    const auto type = [&](const char* key) {
      const std::string name = json.at(key);
      for (const DType one : {DType::kF32, DType::kBF16, DType::kF16}) {
        if (name == dtype_name(one)) return one;
      }
      throw std::runtime_error(std::string(key) + " is neither fp32 nor bf16 nor fp16");
    };
    NumericsPlan n;
    n.dtype = type("dtype");
    // A record without it is of a run with one type for both.
    n.fp32_adapters = json.contains("trained") && type("trained") != n.dtype;
    if (n.fp32_adapters && type("trained") != DType::kF32)
      throw std::runtime_error("trained is neither dtype nor fp32");
    const std::string products = json.value("products", "fp32");  // a record without it is older
    if (products != "fp32" && products != "tf32")
      throw std::runtime_error("products is neither fp32 nor tf32");
    n.products = products == "tf32" ? Products::kTF32 : Products::kF32;
    n.gradient_dtype = type("gradients");
    if (n.gradient_dtype == DType::kF16) throw std::runtime_error("gradients is fp16");
    n.micro_batch = count("micro_batch", int64_t{1} << 30);
    n.row_chunk = count("row_chunk", int64_t{1} << 30);
    n.round_rows = json.at("round_rows").get<bool>();
    const std::string recompute = json.at("recompute");
    const std::optional<RecomputeChoice> level = parse_recompute(recompute);
    if (!level || level->chosen_by_plan()) throw std::runtime_error("recompute has no level");
    n.recompute = *level;
    n.threads = static_cast<int>(count("threads", 4096));
    n.kernel_set = json.at("kernel_set").get<std::string>();
    n.libraries = json.value("libraries", "");  // a record without it is older
    n.ranks = static_cast<int>(count("ranks", 1 << 20));
    // A record without it is of a run that added up all ranks in their order.
    n.machine_ranks = json.contains("machine_ranks") ? static_cast<int>(count("machine_ranks", n.ranks)) : 1;
    if (n.ranks % n.machine_ranks != 0) throw std::runtime_error("machine_ranks does not divide ranks");
    return n;
  } catch (const std::exception& error) {
    throw Error(Exit::kIncompatible,
                {.area = "RUN-26",
                 .what = std::string("the run's numerics cannot be read: ") + error.what(),
                 .place = place,
                 .next = "set run.dir to a new directory",
                 .kept = "the directory, untouched"});
  }
}

}  // namespace lm
