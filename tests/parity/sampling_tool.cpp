// The choice of tokens, for comparison with other people's code: reads
//   {"logits": [...], "temperature": T, "top_k": K, "top_p": P, "seed": S, "draws": N}
// from standard input and writes {"candidates": [[token, weight], ...], "drawn": [token, ...]}.
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "train/sampling.h"

int main() {
  const nlohmann::json request = nlohmann::json::parse(std::cin);
  const auto logits = request.at("logits").get<std::vector<float>>();
  const lm::Sampling sampling{.temperature = request.at("temperature"),
                              .top_k = request.at("top_k"),
                              .top_p = request.at("top_p"),
                              .seed = request.at("seed")};
  nlohmann::json answer = {{"candidates", nlohmann::json::array()}, {"drawn", nlohmann::json::array()}};
  for (const lm::Candidate& one : lm::candidates(sampling, logits))
    answer["candidates"].push_back({one.token, one.weight});
  for (int64_t i = 0; i < request.at("draws").get<int64_t>(); ++i)
    answer["drawn"].push_back(lm::choose_token(sampling, logits, i));
  std::printf("%s\n", answer.dump().c_str());
  return 0;
}
