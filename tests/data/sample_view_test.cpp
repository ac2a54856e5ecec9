#include "data/sample_view.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

// An answer of four tokens and its end behind a question of three.
Prepared chat() {
  Prepared prepared;
  prepared.examples = 1;
  prepared.tokens = prepared.sample_tokens = 8;
  prepared.trained_tokens = 5;
  prepared.sample = {{"what", false}, {" is", false}, {" it?", false}, {" a", true},
                     {" la", true},   {"zy", true},   {" dog", true},  {"<end>", true}};
  return prepared;
}

bool shows(const std::string& view, const std::string& text) {
  return view.find(text) != std::string::npos;
}

TEST(SampleView, ShowsWhatASequenceHolds) {
  EXPECT_TRUE(shows(sample_view(chat(), false, {.most = 8}), "what is it?« a lazy dog<end>»\n"));
  const std::string cut = sample_view(chat(), false, {.most = 6});
  EXPECT_TRUE(
      shows(cut, "what is it?« a lazy» ... (cut here, at data.max_length 6: 2 more tokens are not trained)"))
      << cut;
  EXPECT_FALSE(shows(cut, "<end>"));
  EXPECT_TRUE(shows(sample_view(chat(), false, {.most = 2}), "what is ... (cut here"));
}

TEST(SampleView, SplitAndDroppedExamplesAreNotCut) {
  Prepared text = chat();
  text.text = {{0, 1}};
  EXPECT_TRUE(shows(sample_view(text, false, {.most = 6}), "dog<end>»\n"));
  EXPECT_TRUE(shows(sample_view(text, false, {.most = 6, .too_long = TooLong::kCut}), "cut here"));
  const std::string dropped = sample_view(chat(), false, {.most = 6, .too_long = TooLong::kDrop});
  EXPECT_TRUE(shows(dropped, "(of 8 tokens, over data.max_length 6: it is dropped)")) << dropped;
}

TEST(SampleView, CountsWhatItDoesNotShow) {
  Prepared longer = chat();
  longer.sample_tokens = 3000;
  EXPECT_TRUE(shows(sample_view(longer, false), " ... (2992 more tokens)"));
  const std::string cut = sample_view(longer, false, {.most = 2000});
  EXPECT_TRUE(shows(cut, " ... (1992 more tokens) ... (cut here, at data.max_length 2000: 1000 more")) << cut;
}

TEST(SampleView, TextCannotSteerATerminal) {
  Prepared prepared = chat();
  EXPECT_TRUE(shows(sample_view(prepared, true), "\x1b[32m a lazy dog<end>\x1b[0m"));
  prepared.sample[0].text = "\x1b]0;evil\x07";
  prepared.notes = {"\x1b]0;evil\x07"};
  EXPECT_FALSE(shows(sample_view(prepared, true), "\x1b]"));
}

}  // namespace
}  // namespace lm
