#include "train/trainer.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

namespace lm {
namespace {

constexpr int64_t kSkipsInRow = 5;      // more end the run
constexpr int64_t kSkipsPerMille = 10;  // of all steps, once a hundred are done
constexpr int64_t kSkipWindow = 100;

}  // namespace

Trainer::Trainer(Rank& rank, BatchSource& loader, const Config& config, const TrainerOptions& options,
                 MetricsFile& metrics)
    : rank_(rank),
      config_(config),
      options_(options),
      metrics_(metrics),
      plateau_(config.optimizer.min_lr_ratio),
      data_(loader) {
  if (scales_loss(config))
    state_.loss_scale = LossScale{.scale = static_cast<float>(config.train.loss_scale)};
}

TrainerResult Trainer::run(const TrainerHooks& hooks) {
  result_ = {};
  hooks_ = &hooks;
  while (state_.step < options_.total_steps) {
    result_.early = patience_is_over();
    if (result_.early) break;
    if (hooks.stop_requested && hooks.stop_requested()) {
      result_.stopped = true;
      break;
    }
    std::optional<Started> next = start_step();
    if (!next) {
      result_.stopped = true;
      break;
    }
    settle();
    unread_ = std::move(next);
    if (needs_results()) settle();
    const bool best = evaluate_if_due(hooks);
    if (hooks.sample && evaluation_due()) hooks.sample(state_.step);
    if (hooks.after_step) hooks.after_step(best);
  }
  settle();
  result_.steps = state_.step;
  result_.device_bytes = device_peak_;
  result_.memory_of_others = std::max(result_.memory_of_others, rank_.memory_of_others());
  return result_;
}

bool Trainer::needs_results() const {
  // The next loss scale follows from this step. A save that rides on a step ends before its row is written,
  // and a traced step's spans are read before the next one is recorded.
  const TrainStep& step = rank_.step();
  return !step.runs_ahead() || state_.loss_scale || step.saving() || step.traced() || evaluation_due() ||
         state_.step == options_.total_steps;
}

void Trainer::finish_step() {
  const StepRow row = read_row(*std::exchange(unread_, std::nullopt));
  if (hooks_->before_row) hooks_->before_row();
  metrics_.write(row);
  if (hooks_->on_step) hooks_->on_step(row);
  count_skipped(row);
  result_.seconds += row.step_ms / 1e3;
  result_.tokens += row.tokens;
}

bool TrainerState::observe(double eval_loss, double threshold) {
  const bool best = std::isfinite(eval_loss) && (!best_eval || eval_loss < *best_eval);
  const bool lower = best && (!best_eval || *best_eval - eval_loss > threshold);
  no_lower = lower ? 0 : no_lower + 1;
  if (best) best_eval = eval_loss, best_step = step;
  return best;
}

bool Trainer::evaluation_due() const {
  const int64_t every = config_.train.eval_every;
  return every > 0 && state_.step % every == 0 && state_.step < options_.total_steps;
}

bool Trainer::evaluate_if_due(const TrainerHooks& hooks) {
  if (!hooks.evaluate || !evaluation_due()) return false;
  const int64_t step = state_.step;
  const double loss = hooks.evaluate(step);
  // Losses during warm-up say nothing about the full rate.
  const bool warm = step > warmup_steps(config_.optimizer, options_.total_steps);
  if (warm && config_.optimizer.schedule == LrSchedule::kReduceLrOnPlateau) plateau_.observe(loss);
  return state_.observe(loss, config_.train.early_stopping_threshold);
}

std::optional<ReadyStep> Trainer::next_data() {
  try {
    return data_.next(state_.step + 1 < options_.total_steps);
  } catch (const Error& error) {
    settle();
    if (error.code() == Exit::kStopped && rank_.group().ranks() == 1) return std::nullopt;
    throw;
  } catch (...) {
    settle();
    throw;
  }
}

std::optional<Trainer::Started> Trainer::start_step() {
  if (!unread_) row_began_ = monotonic_seconds();
  const std::optional<ReadyStep> ready = next_data();
  if (!ready) return std::nullopt;
  const ReadyStep& data = *ready;
  const StepBatches& batches = data.batches;
  const double factor =
      schedule_factor(config_.optimizer, state_.step, options_.total_steps) * plateau_.factor();
  const double lr = config_.optimizer.lr * factor;
  between_steps_ = false;
  const double scale = state_.loss_scale ? state_.loss_scale->scale : 1.0;
  rank_.step().start(batches, state_.step + 1, lr, scale);
  between_steps_ = true;
  ++state_.step;
  Started step{.row = {}, .work = work_of(batches)};
  step.row.step = state_.step;
  step.row.lr = lr;
  step.row.target_tokens = batches.target_tokens;
  step.row.tokens = batches.tokens;
  step.row.data_ms = data.waited_seconds * 1e3;
  step.row.epoch = data.epoch;
  return step;
}

StepRow Trainer::read_row(Started step) {
  const StepResult done = rank_.step().finish();
  StepRow row = std::move(step.row);
  row.loss = done.loss;
  if (rank_.scores() == 0) row.token_accuracy = done.token_accuracy;
  row.columns = done.columns;
  row.grad_norm = done.grad_norm;
  row.skipped = done.skipped;
  row.fault = done.fault;
  row.routed_waits = done.routed.waits;
  row.routed_bytes = done.routed.bytes;
  scale_loss(row);
  const double now = monotonic_seconds(), seconds = now - std::exchange(row_began_, now);
  row.step_ms = seconds * 1e3;
  row.tokens_per_s = static_cast<double>(row.tokens) / seconds;
  state_.tokens += row.tokens;
  state_.seconds += seconds;
  if (options_.utilization) row.sol_pct = 100 * options_.utilization(step.work, seconds);
  // We allocate nothing within a step, and LibTorch frees nothing: the value between steps is the peak.
  row.device_bytes = device_peak_ = std::max(device_peak_, device_bytes());
  const int64_t of_others = rank_.memory_of_others();
  row.host_bytes = resident_bytes() - of_others;
  result_.memory_of_others = std::max(result_.memory_of_others, of_others);
  result_.host_bytes = std::max(result_.host_bytes, row.host_bytes);
  row.disk_bytes = rank_.off_device().disk_bytes();
  count_moved(row);
  return row;
}

void Trainer::count_moved(StepRow& row) {
  const auto since = [](auto now, auto& before) { return now - std::exchange(before, now); };
  row.sent_bytes = since(rank_.sent_bytes(), sent_);
  row.between_machines_bytes = since(rank_.sent_between_machines(), sent_between_);
  const OffDeviceState& off_device = rank_.off_device();
  if (DeviceClock* const clock = off_device.clock()) {
    clock->collect();
    row.to_device_bytes = since(clock->to_device_bytes(), to_device_);
    row.from_device_bytes = since(clock->from_device_bytes(), from_device_);
  }
  const IoCounters disks = off_device.counters();
  row.read_bytes = since(disks.read_bytes, disks_.read_bytes);
  row.written_bytes = since(disks.written_bytes, disks_.written_bytes);
  row.disk_seconds = since(disks.busy_seconds, disks_.busy_seconds);
  row.wait_seconds = since(off_device.wait_seconds(), waited_);
  row.hidden_pct = hidden_pct(since(off_device.busy_seconds(), busy_), row.wait_seconds);
}

void Trainer::scale_loss(StepRow& row) {
  if (!state_.loss_scale) return;
  LossScale& scale = *state_.loss_scale;
  row.loss_scale = scale.scale;
  // A loss that is not finite is not the scale's doing: it multiplies gradients alone.
  row.overflow = row.skipped && std::isfinite(row.loss) && scale.scale >= LossScale::kLeast;
  scale.observe(!row.skipped, config_.train);
  if (!row.overflow) return;
  row.skipped = false;
  ++scale.overflows;
  log_line(fmt::format(
      "step {}: {} at loss scale {:g}: step skipped, no weight has changed; the next scale is {:g}", row.step,
      row.fault, *row.loss_scale, scale.scale));
}

void Trainer::count_skipped(const StepRow& row) {
  if (row.overflow) return;
  if (!row.skipped) {
    state_.skipped_in_row = 0;
    return;
  }
  ++state_.skipped;
  ++state_.skipped_in_row;
  const std::string where = fmt::format("step {}: {}", row.step, row.fault);
  log_warning("NUM-12", fmt::format("{}: step skipped, no weight has changed; loss {:f}, gradient norm {:f}",
                                    where, row.loss, row.grad_norm));
  const bool too_many = row.step >= kSkipWindow && state_.skipped * 1000 > row.step * kSkipsPerMille;
  if (state_.skipped_in_row <= kSkipsInRow && !too_many) return;
  throw Error(Exit::kNumerics, {.area = "NUM-12",
                                .what = fmt::format("{}: {} steps were skipped, {} in a row", where,
                                                    state_.skipped, state_.skipped_in_row),
                                .place = "",
                                .next = "lower optimizer.lr or raise optimizer.warmup"});
}

TrainerState Trainer::state() const {
  LM_CHECK(!unread_, "the state of a step whose results are unread");
  TrainerState out = state_;
  out.plateau = plateau_.state();
  out.data = data_.position();
  return out;
}

void Trainer::restore(const TrainerState& state) {
  state_ = state;
  unread_.reset();
  between_steps_ = true;
  plateau_.restore(state.plateau);
  data_.restore(state.data);
}

namespace {

Json position_json(const LoaderPosition& data) {
  Json json = {{"epoch", data.epoch}, {"step", data.step}, {"fingerprint", data.fingerprint}};
  if (!data.stream) return json;
  const StreamAnchor& at = *data.stream;
  json["stream"] = {{"file", at.rows.file},      {"row", at.rows.row},      {"byte", at.rows.byte},
                    {"format", at.rows.format},  {"rows", at.rows.rows},    {"done", at.rows.done},
                    {"skip", at.skip},           {"examples", at.examples}, {"window", at.window},
                    {"sequences", at.sequences}, {"room", at.room}};
  return json;
}

LoaderPosition parse_position(const Json& json) {
  const auto whole = [](const Json& object, const char* key) { return json_integer(object.at(key)); };
  LoaderPosition data = {whole(json, "epoch"), whole(json, "step"), whole(json, "fingerprint")};
  const auto found = json.find("stream");
  if (found == json.end()) return data;
  const Json& at = *found;
  StreamAnchor anchor{.rows = {.file = whole(at, "file"),
                               .row = whole(at, "row"),
                               .byte = whole(at, "byte"),
                               .format = at.at("format").get<std::string>(),
                               .rows = whole(at, "rows"),
                               .done = whole(at, "done")},
                      .skip = whole(at, "skip"),
                      .examples = whole(at, "examples"),
                      .window = whole(at, "window"),
                      .sequences = whole(at, "sequences"),
                      .room = {}};
  for (const Json& room : at.at("room").get_ref<const Json::array_t&>())
    anchor.room.push_back(json_integer(room));
  data.stream = std::move(anchor);
  return data;
}

// What the state of every run has.
Json common_json(const TrainerState& s) {
  return {{"step", s.step},
          {"skipped", s.skipped},
          {"skipped_in_row", s.skipped_in_row},
          {"tokens", s.tokens},
          {"seconds", s.seconds},
          {"best_eval", s.best_eval ? Json(*s.best_eval) : Json()},
          {"best_step", s.best_step},
          {"no_lower", s.no_lower},
          {"plateau",
           {{"best", s.plateau.best},
            {"factor", s.plateau.factor},
            {"bad", s.plateau.bad},
            {"seen", s.plateau.seen}}},
          {"data", position_json(s.data)}};
}

}  // namespace

Json state_json(const TrainerState& s) {
  Json json = common_json(s);
  // Checkpoints of models in other types have no such key.
  if (s.loss_scale) {
    json["loss_scale"] = {
        {"scale", s.loss_scale->scale}, {"good", s.loss_scale->good}, {"overflows", s.loss_scale->overflows}};
  }
  return json;
}

TrainerState parse_trainer_state(const Json& json, const std::string& place) {
  try {
    const auto whole = [](const Json& object, const char* key) { return json_integer(object.at(key)); };
    const Json &plateau = json.at("plateau"), &best = json.at("best_eval");
    TrainerState s;
    s.step = whole(json, "step"), s.best_step = whole(json, "best_step"), s.tokens = whole(json, "tokens");
    s.skipped = whole(json, "skipped"), s.skipped_in_row = whole(json, "skipped_in_row");
    s.seconds = json.at("seconds").get<double>();
    s.no_lower = whole(json, "no_lower");
    if (!best.is_null()) s.best_eval = best.get<double>();
    s.plateau = {plateau.at("best"), plateau.at("factor"), whole(plateau, "bad"), whole(plateau, "seen")};
    s.data = parse_position(json.at("data"));
    if (const auto found = json.find("loss_scale"); found != json.end()) {
      s.loss_scale = {found->at("scale").get<float>(), whole(*found, "good"), whole(*found, "overflows")};
      const bool valid = std::isfinite(s.loss_scale->scale) && s.loss_scale->scale > 0;
      if (!valid) throw std::runtime_error("loss_scale is no positive number");
    }
    return s;
  } catch (const std::exception& error) {
    throw Error(Exit::kInput, {.area = "CKPT-07",
                               .what = std::string("the trainer's state: ") + error.what(),
                               .place = place,
                               .next = "use another checkpoint",
                               .kept = "the checkpoint"});
  }
}

}  // namespace lm
