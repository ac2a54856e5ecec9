// Objectives whose weights are known after the first phase of the head.
#pragma once

#include <span>
#include <string_view>

#include "train/objectives/objective.h"

namespace lm::offloaded_run {

// Leaves the weights as they are known beforehand.
inline const Objective kTwoPhases{.weigh = [](std::span<const SampleRows>, std::span<double>) {}};

inline constexpr std::string_view kLoss[] = {"loss"};
inline const Objective kWeighed{.columns = kLoss,
                                .weigh = [](std::span<const SampleRows> samples, std::span<double> columns) {
                                  for (const SampleRows& rows : samples) {
                                    for (size_t r = 0; r < rows.nll.size(); ++r) {
                                      rows.weight[r] *= rows.nll[r] - static_cast<float>(rows.sample);
                                      columns[0] += rows.nll[r];
                                    }
                                  }
                                }};

}  // namespace lm::offloaded_run
