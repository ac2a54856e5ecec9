// A row of the reliability report (rows.py has the same): written where LM_RELIABILITY says, if it does.
#pragma once

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/clock.h"
#include "base/json.h"

namespace lm {

class Row {
 public:
  Row(std::string suite, const std::string& failure, const std::string& how)
      : suite_(std::move(suite)), start_(monotonic_seconds()) {
    const char* const counts = std::getenv("LM_FAULTS");
    row_ = {{"failure", failure},
            {"how", how},
            {"tries", 0},
            {"outcomes", Json::object()},
            {"figures", Json::object()},
            {"seed", nullptr},
            {"counts", counts != nullptr ? counts : "short"}};
  }
  void tried() { row_["tries"] = row_["tries"].get<int64_t>() + 1; }
  void count(const std::string& outcome, int64_t number = 1) {
    row_["outcomes"][outcome] = row_["outcomes"].value(outcome, int64_t{0}) + number;
  }
  void figure(const std::string& name, const Json& value) { row_["figures"][name] = value; }
  void seed(uint64_t value) { row_["seed"] = value; }
  void skip(const std::string& why) { row_["skipped"] = why; }
  void write() {
    row_["seconds"] = static_cast<double>(static_cast<int64_t>((monotonic_seconds() - start_) * 10)) / 10;
    std::puts(row_.dump().c_str());
    const char* const directory = std::getenv("LM_RELIABILITY");
    if (directory == nullptr) return;
    std::filesystem::create_directories(directory);
    std::ofstream(std::string(directory) + "/" + suite_ + ".json") << row_.dump(1) << "\n";
  }

 private:
  std::string suite_;
  double start_;
  Json row_;
};

}  // namespace lm
