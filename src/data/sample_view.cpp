#include "data/sample_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// The text may contain control sequences: it is escaped before our own colours are added.
std::string marked(const std::string& text, bool trained, bool terminal) {
  const std::string harmless = escape_controls(text);
  if (!trained || text.empty()) return harmless;
  return terminal ? "\x1b[32m" + harmless + "\x1b[0m" : "«" + harmless + "»";
}

// The first `count` tokens, in runs of trained or untrained text.
std::string text_of(const Prepared& prepared, int64_t count, bool terminal) {
  std::string out, run;
  bool trained = false;
  for (int64_t i = 0; i < count; ++i) {
    const SamplePiece& piece = prepared.sample[static_cast<size_t>(i)];
    if (piece.trained != trained) out += marked(std::exchange(run, ""), trained, terminal);
    trained = piece.trained;
    run += piece.text;
  }
  return out + marked(run, trained, terminal);
}

}  // namespace

std::string sample_view(const Prepared& prepared, bool terminal, const SampleLength& length) {
  const double share = prepared.tokens > 0 ? 100.0 * static_cast<double>(prepared.trained_tokens) /
                                                 static_cast<double>(prepared.tokens)
                                           : 0.0;
  std::string view = fmt::format("data: {}{} examples, {} tokens, {:.1f} % of them trained{}\n",
                                 prepared.streamed ? "streamed; of the first rows " : "", prepared.examples,
                                 prepared.tokens, share, prepared.from_cache ? " (from the cache)" : "");
  for (const std::string& note : prepared.notes) view += "data: " + escape_controls(note) + "\n";
  view += terminal ? "one example, trained text in green:\n" : "one example, trained text between « and »:\n";
  const bool text = !prepared.text.empty() && prepared.text.front().begin == 0;
  const TooLong choice = length.too_long != TooLong::kAuto ? length.too_long
                         : text                            ? TooLong::kSplit
                                                           : TooLong::kCut;
  const int64_t all = prepared.sample_tokens;
  const int64_t used = choice == TooLong::kCut ? std::min(all, length.most) : all;
  const int64_t shown = std::min(used, std::ssize(prepared.sample));
  view += text_of(prepared, shown, terminal);
  if (used > shown) view += fmt::format(" ... ({} more tokens)", used - shown);
  if (all > used)
    view += fmt::format(" ... (cut here, at data.max_length {}: {} more tokens are not trained)", length.most,
                        all - used);
  if (choice == TooLong::kDrop && all > length.most)
    view += fmt::format(" ... (of {} tokens, over data.max_length {}: it is dropped)", all, length.most);
  return view + "\n";
}

}  // namespace lm
