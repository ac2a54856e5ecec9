// A step's check: loss and norm of all ranks, the clip factor, whether the step is skipped and by what. On a
// GPU without ranks, transfers or objectives that the host computes it waits for nothing (device_decision.h).
#include <fmt/format.h>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "train/step.h"

namespace lm {
namespace {

std::string fault_text(const std::optional<NonFinite>& gradient, double loss) {
  if (gradient) return "the gradient of tensor " + gradient->tensor + " is " + gradient->kind;
  return std::isnan(loss) ? "the loss is nan" : "the loss is inf";
}

// What a rank says of a fault.
struct Finding {
  bool element = false;  // it has the number itself; else only the norm, which all know
  char text[255] = {};
};

}  // namespace

void TrainStep::check() {
  end_routers();
  if (decision_) return decide();
  device_group_.end_before(context_.stream);
  gradients_->send_squares();
  LossSums sums;
  for (const LossSums& part : group_.gather("loss", read_loss())) {  // the step's one wait
    sums.nll += part.nll;
    sums.correct += part.correct;
  }
  const double divisor = batches_->divisor();
  result_.loss = divisor > 0 ? sums.nll / divisor : 0.0;
  result_.token_accuracy =
      batches_->target_tokens > 0 ? sums.correct / static_cast<double>(batches_->target_tokens) : 0.0;
  gather_columns(divisor);
  add_router_columns(host_sums_->routers, result_);
  result_.grad_norm = std::sqrt(gradients_->total_square()) / loss_scale_;
  result_.skipped = !std::isfinite(result_.loss) || !std::isfinite(result_.grad_norm);
  faulty_block_ = result_.skipped ? gradients_->non_finite_block() : std::nullopt;
  // Of two backwards the second has the block's gradient.
  if (result_.skipped && !(faulty_block_ && config_.two_pass_clip()))
    result_.fault = find_fault(faulty_block_, result_.loss);
  if (config_.clip != Clip::kGlobal) {
    if (result_.skipped) fail_step(result_.fault);
    return;
  }
  update_ = {.lr = lr_,
             .scale = static_cast<float>(clip_factor(result_.grad_norm, config_.max_grad_norm) / loss_scale_),
             .step = step_,
             .skipped = result_.skipped};
  update_begun_ = false;
}

// The same, in stream order. Of the step before it is known by now whether it was skipped, and so how many
// updates there were: its results came when this step began.
void TrainStep::decide() {
  if (decision_->unread() > 0) read_decision();
  const double divisor = batches_->divisor();
  decision_->enqueue(sums()->loss, routers_ ? &sums()->routers : nullptr,
                     {.divisor = divisor, .loss_scale = loss_scale_, .max_grad_norm = config_.max_grad_norm});
  started_.push_back(batches_->target_tokens);
  update_ = {.lr = lr_, .scale = 1, .step = step_, .skipped = false};
  update_begun_ = false;
}

void TrainStep::read_decision() {
  const StepDecision decision = decision_->read();
  const int64_t target_tokens = started_.front();
  started_.pop_front();
  StepResult result{
      .loss = decision.loss,
      .token_accuracy = target_tokens > 0 ? decision.correct / static_cast<double>(target_tokens) : 0.0,
      .grad_norm = decision.grad_norm,
      .skipped = decision.skipped != 0,
      .fault = ""};
  add_router_columns(decision.routers, result);
  if (result.skipped) {
    if (std::exchange(update_begun_, false)) optimizer_->take_back_update();
    result.fault = fault_text(gradients_->non_finite(decision), result.loss) + " (rank 0)";
  }
  finished_.push_back(std::move(result));
}

StepResult TrainStep::finish() {
  if (finished_.empty() && !started_.empty()) read_decision();
  LM_CHECK(!finished_.empty(), "no step to finish");
  StepResult result = std::move(finished_.front());
  finished_.pop_front();
  return result;
}

// A first backward has found the fault, the second one has the gradient.
void TrainStep::explain_skip(int64_t block) {
  if (!config_.two_pass_clip() || faulty_block_ != block || !result_.fault.empty()) return;
  device_group_.end_before(context_.stream);
  result_.fault = find_fault(block, result_.loss);
}

std::string TrainStep::find_fault(std::optional<int64_t> block, double loss) const {
  const std::optional<NonFinite> here = block ? gradients_->find_non_finite(*block) : std::nullopt;
  Finding mine{.element = here && here->element};
  fault_text(here, loss).copy(mine.text, sizeof mine.text - 1);
  const std::vector<Finding> all = group_.gather("what failed a step", mine);
  size_t rank = 0;
  for (size_t r = all.size(); r-- > 0;) {
    if (all[r].element) rank = r;
  }
  return fmt::format("{} (rank {})", all[rank].text, rank);
}

// Without global clipping: the block's own norm decides.
float TrainStep::block_scale(int64_t block) const {
  device_group_.end_before(context_.stream);
  const double norm = std::sqrt(gradients_->block_square(block));
  device_group_.check();
  if (!std::isfinite(norm)) fail_step(find_fault(block, 0));
  return config_.clip == Clip::kBlock ? clip_factor(norm, config_.max_grad_norm) : 1.0F;
}

void TrainStep::fail_step(const std::string& fault) const {
  throw Error(
      Exit::kNumerics,
      {.area = "NUM-12",
       .what = fmt::format("step {}: {}; the weights of other layers may already have this step's update",
                           step_, fault),
       .place = "",
       .next = "lower optimizer.lr, or set optimizer.clip = \"global\", which skips such a step",
       .kept = "what was saved before this step"});
}

}  // namespace lm
