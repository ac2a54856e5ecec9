#include "config/streaming_rules.h"

#include "config/config_text.h"

namespace lm {

std::vector<KeyRule> streaming_rules(const Config& config, bool window_given) {
  const DataConfig& data = config.data;
  const TrainConfig& train = config.train;
  if (!data.streaming) {
    return {{!window_given || data.shuffle_window == DataConfig().shuffle_window, "data.shuffle_window",
             "data.streaming",
             "data.shuffle_window = " + value_text(data.shuffle_window) +
                 " is that of data.streaming = true; a token cache is shuffled as a whole: leave it out"}};
  }
  const std::string streamed = "data.streaming = true reads rows while the run trains";
  std::string steps = streamed + ", so the steps of an epoch are not known";
  if (train.epochs) steps += " and train.epochs = " + value_text(train.epochs) + " has no end";
  steps += ": set train.steps" + std::string(train.epochs ? " in its place" : "");
  return {
      {train.steps.has_value(), "data.streaming", "train.steps", steps},
      {data.eval_fraction == 0, "data.eval_fraction", "data.streaming",
       streamed + ", and data.eval_fraction = " + value_text(data.eval_fraction) +
           " holds out examples of all of them: name files in data.eval"},
      {data.weights.empty(), "data.weights", "data.streaming",
       streamed + ", and data.weights chooses among all of an epoch: write rows that shall occur more often "
                  "into several files"}};
}

}  // namespace lm
