// Where a trainer stands, as a checkpoint's manifest has it.
#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "train/trainer.h"

namespace lm {
namespace {

TrainerState some_state() {
  TrainerState s;
  s.step = 7, s.skipped = 3, s.skipped_in_row = 2, s.tokens = 12345678901, s.seconds = 0.1 + 0.2;
  s.best_eval = 1.0 / 3, s.best_step = 6, s.no_lower = 2;
  s.plateau = {.best = 2.0 / 3, .factor = 0.1, .bad = 4, .seen = 9};
  s.data = {.epoch = 5, .step = 11, .fingerprint = 0x123456789abcdef};
  return s;
}

TEST(TrainerState, ComesBackWhole) {
  const TrainerState s = some_state();
  const TrainerState back = parse_trainer_state(Json::parse(state_json(s).dump()), "m");
  EXPECT_EQ(back.step, s.step);
  EXPECT_EQ(back.skipped, s.skipped);
  EXPECT_EQ(back.skipped_in_row, s.skipped_in_row);
  EXPECT_EQ(back.tokens, s.tokens);
  EXPECT_EQ(back.seconds, s.seconds);
  EXPECT_EQ(back.best_eval, s.best_eval);
  EXPECT_EQ(back.best_step, s.best_step);
  EXPECT_EQ(back.no_lower, s.no_lower);
  EXPECT_EQ(back.plateau.best, s.plateau.best);
  EXPECT_EQ(back.plateau.factor, s.plateau.factor);
  EXPECT_EQ(back.plateau.bad, s.plateau.bad);
  EXPECT_EQ(back.plateau.seen, s.plateau.seen);
  EXPECT_EQ(back.data.epoch, s.data.epoch);
  EXPECT_EQ(back.data.step, s.data.step);
  EXPECT_EQ(back.data.fingerprint, s.data.fingerprint);
}

TEST(TrainerState, ThePositionOfStreamedRowsComesBackWhole) {
  TrainerState s = some_state();
  EXPECT_FALSE(parse_trainer_state(Json::parse(state_json(s).dump()), "m").data.stream);
  StreamAnchor& anchor = s.data.stream.emplace();
  anchor.rows.file = 1, anchor.rows.row = 2, anchor.rows.byte = int64_t{1} << 40;
  anchor.rows.format = "chat", anchor.rows.rows = 4, anchor.rows.done = 5;
  anchor.skip = 6, anchor.examples = 7, anchor.window = 8, anchor.sequences = 9;
  anchor.room = {3, 0, 12};
  Json json = state_json(s);
  EXPECT_EQ(parse_trainer_state(Json::parse(json.dump()), "m").data.stream, s.data.stream);
  for (const char* key : {"file", "format", "done", "room"}) {
    Json damaged = json;
    damaged["data"]["stream"][key] = Json::object();
    EXPECT_THROW(parse_trainer_state(damaged, "m"), Error) << key;
  }
}

TEST(TrainerState, WithoutAnEvaluationThereIsNoBest) {
  TrainerState s = some_state();
  s.best_eval.reset();
  EXPECT_FALSE(parse_trainer_state(Json::parse(state_json(s).dump()), "m").best_eval);
}

TEST(TrainerState, ALossThatIsNoNumberIsNeverTheLeast) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  TrainerState s;
  s.step = 1;
  EXPECT_FALSE(s.observe(nan, 0));
  EXPECT_FALSE(s.best_eval);
  s.step = 2;
  EXPECT_TRUE(s.observe(2.0, 0));
  EXPECT_EQ(s.no_lower, 0);
  for (const double loss : {nan, -std::numeric_limits<double>::infinity(), 2.0})
    EXPECT_FALSE(s.observe(loss, 0));
  EXPECT_EQ(s.best_eval, 2.0);
  EXPECT_EQ(s.best_step, 2);
  EXPECT_EQ(s.no_lower, 3);
  s.step = 3;
  EXPECT_TRUE(s.observe(1.9, 0.5));  // the least, and not by enough for early stopping
  EXPECT_EQ(s.best_step, 3);
  EXPECT_EQ(s.no_lower, 4);
}

TEST(TrainerState, HasTheLossScaleOfAnFp16ModelAlone) {
  TrainerState s = some_state();
  EXPECT_FALSE(state_json(s).contains("loss_scale"));
  EXPECT_FALSE(parse_trainer_state(state_json(s), "m").loss_scale);
  s.loss_scale = LossScale{.scale = 0x1.8p20F, .good = 1999, .overflows = 7};
  const Json json = Json::parse(state_json(s).dump());
  EXPECT_EQ(parse_trainer_state(json, "m").loss_scale, s.loss_scale);
  for (const char* key : {"scale", "good", "overflows"}) {
    Json without = json;
    without["loss_scale"].erase(key);
    EXPECT_THROW(parse_trainer_state(without, "m"), Error) << key;
  }
  Json zero = json;
  zero["loss_scale"]["scale"] = 0;
  EXPECT_THROW(parse_trainer_state(zero, "m"), Error);
}

// What torch.amp.GradScaler(init_scale=1024, growth_interval=3) gives for these steps.
TEST(LossScale, IsThatOfTorch) {
  TrainConfig config;
  config.loss_scale_interval = 3;
  LossScale scale{.scale = 1024};
  const std::pair<bool, float> steps[] = {
      {true, 512},  {true, 256},  {false, 256}, {false, 256}, {false, 512}, {false, 512},  {true, 256},
      {false, 256}, {false, 256}, {false, 512}, {false, 512}, {false, 512}, {false, 1024}, {true, 512}};
  for (const auto& [overflow, after] : steps) {
    scale.observe(!overflow, config);
    EXPECT_EQ(scale.scale, after);
  }
  // It stays where one more doubling is no number, and counts anew.
  scale = {.scale = 0x1p127F, .good = 2};
  scale.observe(true, config);
  EXPECT_EQ(scale.scale, 0x1p127F);
  EXPECT_EQ(scale.good, 0);
  EXPECT_EQ(TrainConfig().loss_scale, 65536);
  EXPECT_EQ(TrainConfig().loss_scale_interval, 2000);
}

TEST(TrainerState, EveryKeyIsNeeded) {
  const Json whole = state_json(some_state());
  for (const auto& [key, value] : whole.items()) {
    Json without = whole;
    without.erase(key);
    EXPECT_THROW(parse_trainer_state(without, "m"), Error) << key;
  }
}

}  // namespace
}  // namespace lm
