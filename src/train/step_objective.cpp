// The objective's part of a step: rows' weights from their nll, and columns of the metrics.
#include "train/step.h"

namespace lm {

void TrainStep::weigh(int64_t micro, const View& rows) {
  const Batch& batch = batches_->micro[static_cast<size_t>(micro)];
  if (objective_.score != nullptr) return score(batch, rows);
  std::vector<float> nll(static_cast<size_t>(rows.rows)), weight = target_weights(batch);
  copy_bytes(nll.data(), rows.data, rows.bytes(), context_.stream);
  synchronize(context_.stream);
  if (objective_.weigh != nullptr) objective_.weigh(rows_by_sample(batch, nll, weight), columns_);
  copy_bytes(rows.data, weight.data(), rows.bytes(), context_.stream);
  synchronize(context_.stream);  // `weight` ends here
}

void TrainStep::score(const Batch& batch, const View& rows) {
  std::vector<float> values(static_cast<size_t>(rows.elements()));
  std::vector<double> gradients(values.size());
  copy_bytes(values.data(), rows.data, rows.bytes(), context_.stream);
  synchronize(context_.stream);
  objective_.score(scores_by_sample(batch, values, gradients, static_cast<size_t>(rows.columns)), columns_);
  const double factor = loss_scale_ / batches_->divisor();
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(gradients[i] * factor);
  copy_bytes(rows.data, values.data(), rows.bytes(), context_.stream);
  synchronize(context_.stream);  // `values` ends here
}

void TrainStep::gather_columns(double divisor) {
  for (size_t c = 0; c < columns_.size(); ++c) {
    const std::string name(objective_.columns[c]);
    double sum = 0;
    for (const double part : group_.gather(name.c_str(), columns_[c])) sum += part;
    const double value = divisor > 0 ? sum / divisor : 0.0;
    if (name == "loss") {
      result_.loss = value;
    } else {
      result_.columns.emplace_back(name, value);
    }
  }
}

}  // namespace lm
