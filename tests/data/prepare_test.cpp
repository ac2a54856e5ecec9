#include "data/prepare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/process.h"
#include "data/content_key.h"
#include "data/loader.h"
#include "data/python_rows.h"
#include "data/sample_view.h"
#include "tests/support/until.h"

namespace {

// Told of each descriptor that is flushed to the disk.
std::function<void(const std::string& path)> on_fsync;

}  // namespace

// In place of the C library's.
extern "C" int fsync(int descriptor) {
  if (on_fsync) on_fsync(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor)));
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace lm {
namespace {

namespace fs = std::filesystem;

// A tokenizer of whole words, written by hand.
constexpr const char* kTokenizer = R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[
  {"id":0,"content":"<unk>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
  {"id":1,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
  "normalizer":null,"pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,"decoder":null,
  "model":{"type":"WordLevel","vocab":{"<unk>":0,"<eos>":1,"ask:":2,"one":3,"two":4,"three":5},"unk_token":"<unk>"}})";

class Prepare : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/lm_prepare_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    fs::create_directory(dir_ + "/model");
    write("model/tokenizer.json", kTokenizer);
    write("model/tokenizer_config.json", R"({"eos_token":"<eos>"})");
    write("a.jsonl", "{\"prompt\":\"ask: one \",\"completion\":\"two three\"}\n");
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ + "/" + name, std::ios::binary | std::ios::trunc) << text;
    return dir_ + "/" + name;
  }
  PrepareOptions options(std::vector<std::string> files) {
    return {.files = std::move(files),
            .format = DataFormat::kAuto,
            .loss_on = LossOn::kCompletion,
            .model_dir = dir_ + "/model",
            .cache_dir = dir_ + "/cache",
            .python = LM_TEST_PYTHON,
            .program_dir = LM_TEST_PREPARE_DIR,
            .workers = 1,
            .stopped = {}};
  }
  // What goes wrong, for a message's check.
  ErrorText refused(const PrepareOptions& wanted, Exit code = Exit::kInput) {
    try {
      prepare_tokens(wanted);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.report();
      return error.text();
    }
    ADD_FAILURE() << "accepted";
    return {};
  }
  std::string dir_;
};

TEST_F(Prepare, MakesTokensThatTheLoaderTakes) {
  const Prepared prepared = prepare_tokens(options({dir_ + "/a.jsonl"}));
  EXPECT_FALSE(prepared.from_cache);
  EXPECT_EQ(prepared.examples, 1);
  const TokenFile file(prepared.path);
  Loader loader(file, nullptr,
                {.seed = 1,
                 .max_length = 16,
                 .too_long = TooLong::kCut,
                 .packing = false,
                 .global_batch = 1,
                 .micro_batch = 1,
                 .vocab = 6,
                 .eval_fraction = 0,
                 .rank = 0,
                 .world = 1});
  const Batch batch = loader.next().micro.at(0);
  EXPECT_EQ(batch.token, (std::vector<int32_t>{2, 3, 4, 5, 1}));
  EXPECT_EQ(batch.target, (std::vector<int32_t>{-1, 4, 5, 1, -1}));
}

TEST_F(Prepare, FindsASecondStartsTokensWithoutPython) {
  const Prepared first = prepare_tokens(options({dir_ + "/a.jsonl"}));
  PrepareOptions again = options({dir_ + "/a.jsonl"});
  again.python = dir_ + "/no_such_python";
  const Prepared second = prepare_tokens(again);
  EXPECT_TRUE(second.from_cache);
  EXPECT_EQ(second.path, first.path);
  EXPECT_EQ(second.tokens, first.tokens);
  EXPECT_EQ(second.sample.size(), first.sample.size());
}

// All examples of the stream from here on: tokens, then marks.
std::vector<std::vector<int32_t>> rest_of(RowStream& rows, std::vector<RowPosition>* ends = nullptr) {
  std::vector<std::vector<int32_t>> out;
  while (const auto chunk = rows.next()) {
    auto token = chunk->tokens.begin();
    auto mark = chunk->trained.begin();
    for (const int64_t length : chunk->lengths) {
      std::vector<int32_t>& one = out.emplace_back(token, token + length);
      one.insert(one.end(), mark, mark + length);
      token += length, mark += length;
    }
    if (ends != nullptr) ends->push_back(chunk->end);
  }
  return out;
}

TEST_F(Prepare, StreamsTheTokensOfATokenFile) {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text +=
        fmt::format("{{\"prompt\":\"ask: one \",\"completion\":\"two{}\"}}\n", i % 3 == 0 ? " three" : "");
  write("many.jsonl", text);
  const PrepareOptions wanted = options({dir_ + "/many.jsonl", dir_ + "/a.jsonl"});
  const Prepared prepared = prepare_tokens(wanted);
  const TokenFile file(prepared.path);
  PythonRows rows(wanted, false);
  std::vector<RowPosition> ends;
  const auto all = rest_of(rows, &ends);
  ASSERT_EQ(std::ssize(all), file.examples());
  ExampleBuffer buffer;
  for (int64_t i = 0; i < file.examples(); ++i) {
    const ExampleView view = file.example(i, 0, file.length(i), buffer);
    std::vector<int32_t> one(view.tokens.begin(), view.tokens.end());
    one.insert(one.end(), view.trained.begin(), view.trained.end());
    EXPECT_EQ(all[static_cast<size_t>(i)], one);
  }
  ASSERT_EQ(ends.size(), 4U);  // of 128 rows at most, of one file
  EXPECT_EQ(ends[1].rows, 256);
  rows.seek(ends[1]);
  EXPECT_EQ(rest_of(rows), std::vector(all.begin() + 256, all.end()));
  EXPECT_EQ(ends.back().done, rows.total_bytes());
  const Prepared& first = rows.first_rows();
  EXPECT_TRUE(first.streamed);
  EXPECT_EQ(first.examples, 129);  // the first rows of each file
  EXPECT_EQ(first.plain_pairs, 129);
  EXPECT_EQ(first.sample.size(), prepared.sample.size());
  EXPECT_EQ(first.sample_tokens, prepared.sample_tokens);
}

TEST_F(Prepare, AStreamKnowsItsFilesByTheirEnds) {
  const auto key = [&] { return PythonRows(options({dir_ + "/a.jsonl"}), false).fingerprint(); };
  const int64_t before = key();
  EXPECT_EQ(key(), before);
  write("a.jsonl", "{\"prompt\":\"ask: two \",\"completion\":\"two three\"}\n");
  EXPECT_NE(key(), before);
}

TEST_F(Prepare, AStreamNamesABadRow) {
  write("bad.jsonl", "{\"prompt\":\"ask: one \",\"completion\":\"two\"}\n{\"prompt\":1}\n");
  try {
    PythonRows(options({dir_ + "/bad.jsonl"}), false);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_EQ(error.text().place, dir_ + "/bad.jsonl:2");
  }
}

// Of rows of choices training has the right ending with its end, an evaluation every ending without one.
TEST_F(Prepare, AnEvaluationHasEveryEndingOfRowsOfChoices) {
  write("c.jsonl",
        "{\"context\":\"ask: one\",\"endings\":[\"two\",\"two three\"],\"label\":1}\n"
        "{\"context\":\"ask: two\",\"endings\":[\"one\",\"two\",\"three\"],\"label\":\"0\"}\n");
  const Prepared trained = prepare_tokens(options({dir_ + "/c.jsonl"}));
  EXPECT_EQ(trained.examples, 2);
  EXPECT_EQ(trained.choice_rows, 2);
  EXPECT_TRUE(trained.groups.empty());
  EXPECT_EQ(trained.trained_tokens, 5);  // two three <eos>, one <eos>
  for (const DataFormat format : {DataFormat::kAuto, DataFormat::kChoices}) {
    PrepareOptions wanted = options({dir_ + "/c.jsonl"});
    wanted.format = format;
    const Prepared scored = prepare_evaluation(wanted);
    EXPECT_EQ(scored.examples, 5);
    EXPECT_EQ(scored.trained_tokens, 6);
    ASSERT_EQ(scored.groups.size(), 2u);
    EXPECT_EQ(scored.groups[0].right, 1);
    EXPECT_EQ(scored.groups[0].characters, (std::vector<int32_t>{3, 9}));
    EXPECT_EQ(scored.groups[1].right, 0);
    EXPECT_EQ(scored.groups[1].characters, (std::vector<int32_t>{3, 3, 5}));
    wanted.python = dir_ + "/no_such_python";
    EXPECT_TRUE(prepare_evaluation(wanted).from_cache);
  }
  const Prepared others = prepare_evaluation(options({dir_ + "/a.jsonl"}));
  EXPECT_EQ(others.path, prepare_tokens(options({dir_ + "/a.jsonl"})).path);
  EXPECT_TRUE(others.groups.empty());
}

TEST_F(Prepare, WhatIsTokenisedIsFoundAndNothingElseIsRead) {
  EXPECT_FALSE(find_tokens(options({dir_ + "/a.jsonl"})));
  EXPECT_FALSE(fs::exists(dir_ + "/cache"));
  const Prepared made = prepare_tokens(options({dir_ + "/a.jsonl"}));
  const auto found = find_tokens(options({dir_ + "/a.jsonl"}));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->path, made.path);
  EXPECT_FALSE(find_tokens(options({dir_ + "/missing.jsonl"})));
  PrepareOptions others = options({dir_ + "/a.jsonl"});
  others.loss_on = LossOn::kAll;
  EXPECT_FALSE(find_tokens(others));
  // The same text, large: until its hash is known it is not looked for.
  const std::string line = "{\"prompt\":\"ask: one \",\"completion\":\"two three\"}\n";
  std::string text;
  while (text.size() < size_t{1} << 20) text += line;
  const std::string big = write("big.jsonl", text);
  const timespec past[2] = {{1000, 5}, {1000, 5}};
  ASSERT_EQ(::utimensat(AT_FDCWD, big.c_str(), past, 0), 0);
  EXPECT_FALSE(ContentHasher(dir_ + "/cache/hashes").knows(big));
  prepare_tokens(options({big}));
  EXPECT_TRUE(ContentHasher(dir_ + "/cache/hashes").knows(big));
  EXPECT_TRUE(find_tokens(options({big})));
  fs::remove(dir_ + "/cache/hashes");
  EXPECT_FALSE(find_tokens(options({big})));
}

TEST_F(Prepare, KnowsContentByItsBytesAndNotByItsName) {
  const std::string first = prepare_tokens(options({dir_ + "/a.jsonl"})).path;
  fs::copy(dir_ + "/a.jsonl", dir_ + "/b.jsonl");
  EXPECT_TRUE(prepare_tokens(options({dir_ + "/b.jsonl"})).from_cache);
  write("b.jsonl", "{\"prompt\":\"ask: one \",\"completion\":\"two two\"}\n");
  EXPECT_NE(prepare_tokens(options({dir_ + "/b.jsonl"})).path, first);
  PrepareOptions all = options({dir_ + "/a.jsonl"});
  all.loss_on = LossOn::kAll;
  EXPECT_NE(prepare_tokens(all).path, first);
  PrepareOptions fewer = options({dir_ + "/a.jsonl"});
  fewer.max_rows = 1;
  EXPECT_NE(prepare_tokens(fewer).path, first);
  EXPECT_EQ(prepare_evaluation(fewer).path, first);  // which takes all rows
  write("model/tokenizer_config.json", R"({"eos_token":"<unk>"})");
  EXPECT_NE(prepare_tokens(options({dir_ + "/a.jsonl"})).path, first);
}

TEST_F(Prepare, SaysThatPlainPairsAreTrainedWithoutTheTemplateUnlessThatIsSet) {
  const auto prepared_as = [&](Render render) {
    PrepareOptions wanted = options({dir_ + "/a.jsonl"});
    wanted.render = render;
    return prepare_tokens(wanted);
  };
  EXPECT_TRUE(prepared_as(Render::kAuto).notes.empty());  // there is no template
  write("model/chat_template.jinja", "{% for m in messages %}{{ m.content + ' <eos> ' }}{% endfor %}");
  const Prepared silent = prepared_as(Render::kPlain), told = prepared_as(Render::kAuto);
  EXPECT_TRUE(silent.notes.empty());
  ASSERT_EQ(told.notes.size(), 1u);
  EXPECT_NE(told.notes[0].find("1 row is a plain prompt"), std::string::npos) << told.notes[0];
  EXPECT_NE(told.notes[0].find("data.render = \"chat\""), std::string::npos) << told.notes[0];
  EXPECT_TRUE(told.from_cache);  // the same tokens
  EXPECT_EQ(told.path, silent.path);
  const Prepared rendered = prepared_as(Render::kChat);
  EXPECT_TRUE(rendered.notes.empty());
  EXPECT_NE(rendered.path, silent.path);
  EXPECT_EQ(rendered.tokens, 6);  // ask: one <eos> two three <eos>
  write("a.jsonl", "{\"text\":\"one two\"}\n");
  EXPECT_TRUE(prepared_as(Render::kAuto).notes.empty());
  ASSERT_EQ(prepared_as(Render::kChat).notes.size(), 1u);
  EXPECT_NE(prepared_as(Render::kChat).notes[0].find("changes nothing"), std::string::npos);
}

// The template's name of the date makes the difference, and nothing else does.
TEST_F(Prepare, TheDateIsPartOfTheKeyOnlyWhereTheTemplateAsks) {
  const auto path_on = [&](const std::string& date) {
    PrepareOptions wanted = options({dir_ + "/a.jsonl"});
    wanted.date = date;
    return prepare_tokens(wanted).path;
  };
  write("model/chat_template.jinja", "{{ messages[0].content }}");
  EXPECT_EQ(path_on("2024-07-26"), path_on("2024-07-27"));
  write("model/chat_template.jinja", "{{ strftime_now('%Y') }}{{ messages[0].content }}");
  EXPECT_EQ(path_on("2024-07-26"), path_on("2024-07-26"));
  EXPECT_NE(path_on("2024-07-26"), path_on("2024-07-27"));
}

TEST_F(Prepare, ATemplateIsToldTheDate) {
  write("model/chat_template.jinja",
        "{% for m in messages %}{{ m.content + ' <eos> ' }}{% endfor %}{{ {'2024': 'one', '2025': "
        "'two'}[strftime_now('%Y')] }}");
  PrepareOptions wanted = options({write("c.jsonl",
                                         "{\"messages\":[{\"role\":\"user\",\"content\":\"ask:\"},"
                                         "{\"role\":\"assistant\",\"content\":\"three\"}]}\n")});
  wanted.loss_on = LossOn::kAll;
  for (const auto& [date, last] : {std::pair("2024-07-26", 3), std::pair("2025-07-26", 4)}) {
    wanted.date = date;
    const Prepared prepared = prepare_tokens(wanted);
    ExampleBuffer buffer;
    const TokenFile file(prepared.path);
    EXPECT_EQ(file.example(0, 0, file.length(0), buffer).tokens.back(), last);
    ASSERT_FALSE(prepared.notes.empty());
    EXPECT_NE(prepared.notes.back().find(std::string("it gets ") + date), std::string::npos);
  }
}

TEST_F(Prepare, MakesADamagedCacheAnew) {
  const Prepared first = prepare_tokens(options({dir_ + "/a.jsonl"}));
  ASSERT_EQ(::truncate(first.path.c_str(), 97), 0);
  testing::internal::CaptureStderr();
  const Prepared second = prepare_tokens(options({dir_ + "/a.jsonl"}));
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("tokenising again"), std::string::npos);
  EXPECT_EQ(told.find("tokenising again"), told.rfind("tokenising again")) << told;  // once
  EXPECT_FALSE(second.from_cache);
  EXPECT_EQ(TokenFile(second.path).tokens(), first.tokens);
}

// Days after its last use, not after it was made.
TEST_F(Prepare, ForgetsTokensThatNobodyHasUsedForMonths) {
  const auto others = [&](int n) {
    return write("b" + std::to_string(n) + ".jsonl", "{\"text\":\"one " + std::string(n, 'x') + " two\"}\n");
  };
  const std::string old = prepare_tokens(options({others(1)})).path,
                    used = prepare_tokens(options({others(2)})).path;
  const std::string foreign = write("cache/mine.tokens", "mine");
  const auto months_ago = fs::file_time_type::clock::now() - std::chrono::hours(100 * 24);
  for (const std::string& path : {old, used, foreign}) fs::last_write_time(path, months_ago);
  EXPECT_TRUE(prepare_tokens(options({others(2)})).from_cache);
  EXPECT_TRUE(fs::exists(old));
  prepare_tokens(options({others(3)}));
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(used));
  EXPECT_TRUE(fs::exists(foreign));
  EXPECT_FALSE(prepare_tokens(options({others(1)})).from_cache);
}

TEST_F(Prepare, NamesTheLineOfABadRow) {
  const std::string path = write("bad.jsonl", "{\"text\":\"one\"}\n{\"text\": two}\n");
  const ErrorText text = refused(options({path}));
  EXPECT_EQ(text.area, "DATA-24");
  EXPECT_NE(text.place.find("bad.jsonl:2:"), std::string::npos) << text.place;
  for (const auto& entry : fs::directory_iterator(dir_ + "/cache")) {
    EXPECT_FALSE(entry.path().string().find(".tokens") != std::string::npos) << entry.path();
  }
}

TEST_F(Prepare, ListsTheColumnsItFoundWhenItKnowsNone) {
  const std::string path = write("odd.jsonl", "{\"question\":\"one\",\"reply\":\"two\"}\n");
  const ErrorText text = refused(options({path}));
  EXPECT_NE(text.what.find("question, reply"), std::string::npos) << text.what;
  EXPECT_NE(text.next.find("prompt + completion"), std::string::npos) << text.next;
}

TEST_F(Prepare, RefusesEmptyAndUntrainableAndMissingData) {
  EXPECT_NE(refused(options({write("empty.jsonl", "\n")})).what.find("empty"), std::string::npos);
  const std::string untrained = write("none.jsonl", R"({"input_ids":[1,2,3],"labels":[-100,-100,-100]})");
  EXPECT_NE(refused(options({untrained})).what.find("training target"), std::string::npos);
  EXPECT_EQ(refused(options({dir_ + "/absent.jsonl"})).place, dir_ + "/absent.jsonl");
  EXPECT_EQ(refused(options({dir_ + "/*.parquet"})).what, "no such data file");
  EXPECT_NE(refused(options({dir_})).what.find("directory"), std::string::npos);
  refused(options({}));
  ASSERT_EQ(::mkfifo((dir_ + "/f.jsonl").c_str(), 0600), 0);
  EXPECT_EQ(refused(options({dir_ + "/f.jsonl"})).what, "not a regular file");
}

TEST_F(Prepare, SaysWhenPythonCannotBeStarted) {
  PrepareOptions wanted = options({dir_ + "/a.jsonl"});
  wanted.python = dir_ + "/no_such_python";
  const ErrorText text = refused(wanted, Exit::kConfig);
  EXPECT_NE(text.next.find("LMLAUNCH_PYTHON"), std::string::npos);
  wanted.python = "/bin/false";
  EXPECT_NE(refused(wanted).what.find("status 1"), std::string::npos);
}

TEST_F(Prepare, ExpandsGlobsInOrder) {
  write("x2.jsonl", "");
  write("x1.jsonl", "");
  const std::string odd = write("x[1].jsonl", "");
  EXPECT_EQ(expand_files({dir_ + "/x[12].jsonl"}),
            (std::vector<std::string>{dir_ + "/x1.jsonl", dir_ + "/x2.jsonl"}));
  EXPECT_EQ(expand_files({odd}), (std::vector<std::string>{odd}));
}

TEST_F(Prepare, DoesNotReadALargeUnchangedFileAgain) {
  const std::string big = write("big.txt", std::string(2 << 20, 'x'));
  const timespec past[2] = {{1000, 5}, {1000, 5}};
  ASSERT_EQ(::utimensat(AT_FDCWD, big.c_str(), past, 0), 0);
  ContentHasher first(dir_ + "/hashes");
  const ContentKey key = first.hash_file(big);
  first.save();
  // Other bytes behind the same stamp are not seen: that is what proves that nothing was read ...
  write("big.txt", std::string(2 << 20, 'y'));
  ASSERT_EQ(::utimensat(AT_FDCWD, big.c_str(), past, 0), 0);
  EXPECT_EQ(ContentHasher(dir_ + "/hashes").hash_file(big), key);
  // ... and a new time is.
  const timespec later[2] = {{1000, 5}, {1000, 6}};
  ASSERT_EQ(::utimensat(AT_FDCWD, big.c_str(), later, 0), 0);
  EXPECT_NE(ContentHasher(dir_ + "/hashes").hash_file(big), key);
  write("hashes", "damaged\n2097152 1000000000005 x\n");
  EXPECT_NE(ContentHasher(dir_ + "/hashes").hash_file(big), key);
}

// Its bytes are flushed by who writes them (prepare_test.py).
TEST_F(Prepare, TheCachesNameIsOnTheDiskBeforeItIsUsed) {
  std::vector<std::string> names;  // in the cache's directory when that was flushed last
  on_fsync = [&](const std::string& path) {
    if (path != dir_ + "/cache") return;
    names.clear();
    for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path());
  };
  const Prepared prepared = prepare_tokens(options({dir_ + "/a.jsonl"}));
  on_fsync = {};
  EXPECT_EQ(std::count(names.begin(), names.end(), prepared.path), 1) << names.size() << " names";
}

TEST_F(Prepare, WaitsForAnotherRunThatTokenisesTheSame) {
  // Two at once: exactly one runs Python, and both get the same file.
  Prepared results[2];
  std::thread other([&] { results[0] = prepare_tokens(options({dir_ + "/a.jsonl"})); });
  results[1] = prepare_tokens(options({dir_ + "/a.jsonl"}));
  other.join();
  EXPECT_EQ(results[0].path, results[1].path);
  EXPECT_NE(results[0].from_cache, results[1].from_cache);
}

TEST_F(Prepare, StopsOnRequestWhilePythonRuns) {
  const std::string pid_file = dir_ + "/pid";
  PrepareOptions wanted = options({dir_ + "/a.jsonl"});
  wanted.python = write("endless", "#!/bin/sh\necho $$ > " + pid_file + "; exec sleep 100000\n");
  fs::permissions(wanted.python, fs::perms::owner_all);
  pid_t python = 0;
  wanted.stopped = [&] { return static_cast<bool>(std::ifstream(pid_file) >> python); };
  refused(wanted, Exit::kStopped);
  EXPECT_GT(python, 0);
  EXPECT_EQ(::kill(python, 0), -1) << "it runs on";
}

TEST_F(Prepare, ItsChildDiesWithIt) {
  const std::string pid_file = dir_ + "/pid";
  const pid_t parent = ::fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    run_program({.argv = {"/bin/sh", "-c", "echo $$ > " + pid_file + "; exec sleep 60"}}, "", {}, {});
    ::_exit(0);
  }
  pid_t child = 0;
  ASSERT_TRUE(test::until([&] { return static_cast<bool>(std::ifstream(pid_file) >> child); }));
  EXPECT_EQ(::kill(child, 0), 0);
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  // Gone, or a zombie that nobody reaps.
  EXPECT_TRUE(test::until([&] {
    std::ifstream status("/proc/" + std::to_string(child) + "/stat");
    std::string pid, name, state;
    return !(status >> pid >> name >> state) || state == "Z";
  }));
}

TEST_F(Prepare, ShowsTheSampleWithTrainedTextApart) {
  const Prepared prepared = prepare_tokens(options({dir_ + "/a.jsonl"}));
  EXPECT_EQ(prepared.sample_tokens, 5);
  const std::string plain = sample_view(prepared, false);
  EXPECT_NE(plain.find("60.0 % of them trained"), std::string::npos) << plain;
  EXPECT_NE(plain.find("ask: one« two three <eos>»"), std::string::npos) << plain;
  // Of two tokens there is nothing that is trained, and of four there is no end.
  const std::string cut = sample_view(prepared, false, {.most = 4});
  EXPECT_NE(cut.find("ask: one« two three» ... (cut here, at data.max_length 4: 1 more tokens"),
            std::string::npos)
      << cut;
}

TEST_F(Prepare, NamesTheUsersFilesWhereNothingIsLearnt) {
  const std::string untrained = write("none.jsonl", R"({"input_ids":[1,2,3],"labels":[-100,-100,-100]})");
  EXPECT_EQ(refused(options({untrained})).place, untrained);
  EXPECT_EQ(names_of({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(names_of({"a", "b", "c", "d", "e"}), "a, b, c and 2 more");
}

}  // namespace
}  // namespace lm
