// A run's files as a page's data: whole, small, and never markup.
#include "launcher/report/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "launcher/presets.h"
#include "launcher/recorded.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class Report : public testing::Test {
 protected:
  Report() {
    char name[] = "/tmp/lmlaunch-report-XXXXXX";
    run_ = mkdtemp(name);
  }
  ~Report() override { fs::remove_all(run_); }

  void append(const std::string& file, const std::string& text) {
    std::ofstream(run_ + "/" + file, std::ios::app) << text;
  }
  void steps(int64_t first, int64_t last) {
    std::string text;
    for (int64_t i = first; i <= last; ++i)
      text += Json{{"step", i},
                   {"loss", 1.0 / static_cast<double>(i)},
                   {"tokens", 10},
                   {"step_ms", 5.0},
                   {"data_ms", 2.0}}
                  .dump() +
              "\n";
    append("metrics.jsonl", text);
  }
  std::string run_;
};

TEST_F(Report, EveryStepOfAShortRunIsAPointWithItsValue) {
  append("metrics.jsonl", "{\"step\":0,\"eval_loss\":2.5,\"target_tokens\":7}\n");
  steps(1, 3);
  append("metrics.jsonl", "{\"step\":3,\"eval_loss\":1.25,\"target_tokens\":7,\"token_accuracy\":0.5}\n");
  Curves curves(run_ + "/metrics.jsonl");
  curves.read();
  EXPECT_EQ(curves.series()["step"], Json({1, 2, 3}));
  EXPECT_EQ(curves.series()["loss"], Json({1.0, 0.5, 0.333333}));
  EXPECT_EQ(curves.series()["lr"], Json({nullptr, nullptr, nullptr}));
  EXPECT_EQ(curves.evaluations(), Json::parse(R"([{"set": "", "points": [[0, 2.5], [3, 1.25, 0.5]]}])"));
  EXPECT_EQ(curves.totals()["tokens"], 30);
  EXPECT_EQ(curves.totals()["tokens_per_s"], 2000);
  EXPECT_EQ(curves.totals()["data_seconds"], 0.006);
}

TEST_F(Report, EachEvaluationSetHasItsCurveAndTheFirstStaysTheFirst) {
  for (const int step : {0, 3}) {
    for (const char* set : {"zeta", "alpha"})
      append(
          "metrics.jsonl",
          Json{{"step", step}, {std::string("eval_loss/") + set, set[0] == 'z' ? 2 : 4}, {"target_tokens", 7}}
                  .dump() +
              "\n");
    steps(step + 1, step + 2);
  }
  Curves curves(run_ + "/metrics.jsonl");
  curves.read();
  EXPECT_EQ(curves.evaluations(), Json::parse(R"([{"set": "zeta", "points": [[0, 2.0], [3, 2.0]]},
                                               {"set": "alpha", "points": [[0, 4.0], [3, 4.0]]}])"));
  EXPECT_EQ(curves.series()["step"], Json({1, 2, 4, 5}));
}

TEST_F(Report, ScoresOfAnswersHaveTheirCurves) {
  for (const int step : {0, 3})
    append("metrics.jsonl",
           Json{{"step", step}, {"eval_loss/a", 2}, {"generate_rouge_l", step / 4.0}, {"generate_mine", 7}}
                   .dump() +
               "\n");
  Curves curves(run_ + "/metrics.jsonl");
  curves.read();
  EXPECT_EQ(curves.scores(), Json::parse(R"([{"name": "mine", "points": [[0, 7.0], [3, 7.0]]},
                                             {"name": "rouge_l", "points": [[0, 0.0], [3, 0.75]]}])"));
}

TEST_F(Report, ALongRunKeepsItsLeastAndItsMostInFewPoints) {
  steps(1, 4999);
  append("metrics.jsonl", "{\"step\":5000,\"loss\":77,\"tokens\":10,\"step_ms\":5}\n");
  steps(5001, 10000);
  Curves curves(run_ + "/metrics.jsonl");
  curves.read();
  const Json series = curves.series();
  ASSERT_LE(series["step"].size(), static_cast<size_t>(Curves::kMostPoints));
  ASSERT_GE(series["step"].size(), static_cast<size_t>(Curves::kMostPoints / 2));
  EXPECT_EQ(series["step"].back(), 10000);
  double most = 0, least = 1e9;
  for (const Json& point : series["loss"]) {
    ASSERT_EQ(point.size(), 3u);
    EXPECT_LE(point[1], point[0]);
    EXPECT_LE(point[0], point[2]);
    most = std::max<double>(most, point[2]);
    least = std::min<double>(least, point[1]);
  }
  EXPECT_EQ(most, 77);
  EXPECT_EQ(least, 1e-4);
  EXPECT_EQ(curves.totals()["tokens"], 100000);
  EXPECT_LT(report_page({RunReport(run_).record()}).size(), size_t{3} << 20);
}

TEST_F(Report, ReadingOnIsReadingAll) {
  Curves live(run_ + "/metrics.jsonl");
  live.read();
  EXPECT_EQ(live.rows(), 0);
  steps(1, 700);
  live.read();
  append("metrics.jsonl", "{\"step\":701,\"loss\":");  // a row that is just being written
  live.read();
  EXPECT_EQ(live.rows(), 700);
  append("metrics.jsonl", "3}\n");
  steps(702, 2000);
  live.read();
  Curves whole(run_ + "/metrics.jsonl");
  whole.read();
  EXPECT_EQ(live.series(), whole.series());
  EXPECT_EQ(live.totals(), whole.totals());
  fs::resize_file(run_ + "/metrics.jsonl", 0);  // the run goes back
  steps(1, 5);
  live.read();
  EXPECT_EQ(live.rows(), 5);
}

TEST_F(Report, TextOfFilesIsDataAndNeverMarkup) {
  append("log.txt", "lmlaunch: note X-1: </script><script>alert(1)</script>\ndata: 3 examples\n");
  append("metrics.jsonl",
         "not a "
         "row\n[]\n{\"step\":\"1\"}\n{\"step\":1,\"skipped\":\"?\"}\n{\"step\":1,\"loss\":null,\"grad_norm\":"
         "2}\n");
  const std::string page = report_page({RunReport(run_).record()});
  EXPECT_EQ(page.find("</script><script>alert"), std::string::npos);
  EXPECT_NE(page.find("\\u003c/script>\\u003cscript>alert(1)"), std::string::npos);
  const Json record = RunReport(run_).record();
  EXPECT_EQ(record["series"]["loss"], Json({nullptr}));  // was not finite
  EXPECT_EQ(record["series"]["grad_norm"], Json({2.0}));
  EXPECT_EQ(record["data"], "data: 3 examples\n");
}

TEST_F(Report, OfLogTxtTheSampleTheNotesAndTheDataAreTold) {
  append("log.txt",
         "data: 9 examples\none example, trained text between « and »:\nuser: «yes»\n\ndata: train: 9 rows, "
         "2 cut\n"
         "lmlaunch: warning NUM-12: step 3: step skipped\nstep 5/60  loss 1.0\nstep 6/60  loss 1.0\n");
  const Json record = RunReport(run_).record();
  EXPECT_EQ(record["sample"], "user: «yes»\n\n");
  EXPECT_EQ(record["data"], "data: 9 examples\ndata: train: 9 rows, 2 cut\n");
  EXPECT_EQ(record["notes"], "lmlaunch: warning NUM-12: step 3: step skipped\n");
  EXPECT_EQ(record["total_steps"], 60);
}

TEST_F(Report, SettingsThatAreNotTheDefaultsAreNamed) {
  append("config.toml", "[model]\npath = \"m\"\n[data]\ntrain = [\"t\"]\n[optimizer]\nlr = 0.5\n");
  const Json settings = RunReport(run_).record()["settings"];
  EXPECT_EQ(settings, Json({{"model.path", "\"\"", "\"m\""},
                            {"data.train", "[]", "[\"t\"]"},
                            {"optimizer.lr", "5e-05", "0.5"}}));
}

TEST_F(Report, WhatAutoBecameIsNoSetting) {
  const std::string keys = "[model]\npath = \"m\"\n[data]\ntrain = [\"t\"]\n[train]\nmicro_batch = ";
  Config asked = parse_config(keys + "\"auto\"\n", "asked.toml", {});
  append("config.toml", auto_mark(asked, "") + keys + "1\n[run]\nthreads = 7\n");
  const Json kept = {{"model.path", "\"\"", "\"m\""}, {"data.train", "[]", "[\"t\"]"}};
  EXPECT_EQ(RunReport(run_).record()["settings"], kept);
  // One that was asked for counts; a run that is started with its own config.toml keeps the mark.
  asked.train.micro_batch = 1;
  EXPECT_EQ(auto_mark(asked, "").find("micro_batch"), std::string::npos);
  EXPECT_NE(auto_mark(asked, "# auto: train.micro_batch\n").find("train.micro_batch"), std::string::npos);
  fs::remove(run_ + "/config.toml");
  append("config.toml", auto_mark(asked, "") + keys + "1\n");
  EXPECT_EQ(RunReport(run_).record()["settings"].size(), kept.size() + 1);
}

TEST_F(Report, ARunOfAPresetIsHeldAgainstIt) {
  const Preset& preset = *find_preset("smollm2-135m-lora");
  EXPECT_EQ(preset_of(preset.text), "");
  const Config config = parse_config(preset.text, preset.name, {"optimizer.lr=0.5"});
  append("config.toml", preset_mark(preset.name) + print_config(config));
  const Json record = RunReport(run_).record();
  EXPECT_EQ(record["preset"],
            Json({{"name", "smollm2-135m-lora"}, {"settings", {{"optimizer.lr", "2e-04", "0.5"}}}}));
  EXPECT_GT(record["settings"].size(), 1u);  // against the defaults
}

TEST_F(Report, ARunOfNoPresetOrOneThatIsNotKnownIsHeldAgainstTheDefaults) {
  const std::string keys = "[model]\npath = \"m\"\n[data]\ntrain = [\"t\"]\n";
  for (const char* head : {"", "# preset: of another version\n", "# mine\n\n# preset: smollm2-135m-lora\n"}) {
    fs::remove(run_ + "/config.toml");
    append("config.toml", head + keys);
    EXPECT_TRUE(RunReport(run_).record()["preset"].is_null()) << head;
  }
}

TEST_F(Report, ACheckpointIsOneOnceItsManifestIsThere) {
  for (const char* name : {"step_00000020", "step_00000040"})
    fs::create_directories(run_ + "/checkpoints/" + name);
  append("checkpoints/step_00000020/MANIFEST.json", "1234");
  append("checkpoints/step_00000020/shard", "56");
  EXPECT_EQ(RunReport(run_).record()["checkpoints"],
            Json::array({{{"name", "step_00000020"}, {"bytes", 6}}}));
}

TEST_F(Report, APageThatCannotBeWrittenIsSaidOnceAndTriedAgain) {
  append("plan.json", "{}");
  fs::create_directories(run_ + "/report.html/in the way");
  testing::internal::CaptureStderr();
  LiveReport live(run_);
  live.finish();
  live.finish();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("report.html"), std::string::npos) << said;
  EXPECT_EQ(said.find("lmlaunch: note"), said.rfind("lmlaunch: note")) << said;
  fs::remove_all(run_ + "/report.html");
  live.finish();
  EXPECT_TRUE(fs::is_regular_file(run_ + "/report.html"));
}

double clock_now = 0;
double clock_seconds() {
  return clock_now;
}

TEST_F(Report, ThePageIsRenewedAgainAndAgainWhileTheRunGoesOn) {
  append("plan.json", "{}");
  clock_now = 100;
  LiveReport live(run_, clock_seconds);
  const auto steps_at = [&](double now) {
    clock_now = now;
    live.refresh();
    const std::string page =
        fs::exists(run_ + "/report.html") ? read_small_file(run_ + "/report.html", 1 << 20) : "";
    const size_t at = page.find("\"step\":[");
    return at == std::string::npos ? -1 : static_cast<int>(page[page.find(']', at) - 1] - '0');
  };
  steps(1, 3);
  EXPECT_EQ(steps_at(104), -1);
  EXPECT_EQ(steps_at(105), 3);
  steps(4, 6);
  EXPECT_EQ(steps_at(124), 3);
  EXPECT_EQ(steps_at(125), 6);
  steps(7, 9);
  EXPECT_EQ(steps_at(144), 6);
  EXPECT_EQ(steps_at(145), 9);
}

TEST_F(Report, ARunThatHasNoPlanYetGetsNoPage) {
  append("status.json", "{}");
  LiveReport(run_).finish();
  EXPECT_FALSE(fs::exists(run_ + "/report.html"));
}

}  // namespace
}  // namespace lm
