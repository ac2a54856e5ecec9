// The choice of tokens, for comparison with other people's code: for each line
//   {"logits": [...], "temperature": T, "top_k": K, "top_p": P, "seed": S, "draws": N}
// of standard input writes a line {"candidates": [[token, weight], ...], "drawn": [token, ...]}.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/limit_processor.h"
#include "train/sampling.h"

namespace {

nlohmann::json answer(const nlohmann::json& request) {
  const auto logits = request.at("logits").get<std::vector<float>>();
  const lm::Sampling sampling{.temperature = request.at("temperature"),
                              .top_k = request.at("top_k"),
                              .top_p = request.at("top_p"),
                              .seed = request.at("seed")};
  nlohmann::json out = {{"candidates", nlohmann::json::array()}, {"drawn", nlohmann::json::array()}};
  for (const lm::Candidate& one : lm::candidates(sampling, logits))
    out["candidates"].push_back({one.token, one.weight});
  for (int64_t i = 0; i < request.at("draws").get<int64_t>(); ++i)
    out["drawn"].push_back(lm::choose_token(sampling, logits, i));
  return out;
}

}  // namespace

int main() {
  lm::test::limit_processor();
  for (std::string line; std::getline(std::cin, line);)
    std::cout << answer(nlohmann::json::parse(line)).dump() << std::endl;
  return 0;
}
