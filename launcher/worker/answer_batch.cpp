#include "launcher/worker/answer_batch.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/error.h"

namespace lm {

int64_t texts_together(const CommandLine& line) {
  constexpr int64_t kDefault = 8, kMost = 256;
  const int64_t texts = line.integer("--batch").value_or(kDefault);
  if (texts < 1 || texts > kMost)
    throw usage_error(fmt::format("--batch: expected 1 to {}, got {}", kMost, texts),
                      "see `lmlaunch " + line.command + " --help`");
  return texts;
}

AnswerBatch::AnswerBatch(Rank& rank) : rank_(rank), places_(static_cast<size_t>(rank.decoder().texts())) {}

int64_t AnswerBatch::running() const {
  return std::ranges::count_if(places_, [](const auto& place) { return place.has_value(); });
}

void AnswerBatch::add(AnswerRequest request) {
  const auto free = std::ranges::find_if(places_, [](const auto& place) { return !place.has_value(); });
  LM_CHECK(free != places_.end(), "there is room for another answer");
  const auto place = static_cast<size_t>(free - places_.begin());
  const std::span<const float> logits =
      rank_.decoder().begin(rank_.step(), static_cast<int64_t>(place), request.prompt, request.on_prompt);
  *free = Running{.request = std::move(request)};
  choose(place, logits);
}

void AnswerBatch::choose(size_t place, std::span<const float> logits) {
  Running& one = *places_[place];
  const AnswerRequest& request = one.request;
  const int64_t room = rank_.decoder().positions() - std::ssize(request.prompt);
  bool stopped = false, goes_on = false;
  // The last token of an answer needs no place in the cache: nothing follows it.
  if (one.tokens < request.most && one.tokens <= room) {
    // Ranks that share weights must run the model equally often.
    const int32_t mine = choose_token(request.sampling, logits, one.tokens);
    one.last = rank_.group().gather("token", mine).front();
    stopped = std::ranges::find(request.stop, one.last) != request.stop.end();
    if (!stopped) {
      ++one.tokens;
      stopped = !request.on_token(one.last, logits);
    }
    goes_on = !stopped && one.tokens < request.most && one.tokens <= room;
  }
  if (goes_on) return;
  // The callback may add another request: the place is free before.
  const auto on_end = std::move(one.request.on_end);
  places_[place].reset();
  on_end(stopped);
}

void AnswerBatch::step() {
  std::vector<Decoder::Next> next;
  for (size_t place = 0; place < places_.size(); ++place) {
    if (places_[place]) next.push_back({static_cast<int64_t>(place), places_[place]->last});
  }
  if (next.empty()) return;
  const std::span<const float> logits = rank_.decoder().next(rank_.step(), next);
  const size_t vocab = logits.size() / next.size();
  for (size_t i = 0; i < next.size(); ++i)
    choose(static_cast<size_t>(next[i].text), logits.subspan(i * vocab, vocab));
}

}  // namespace lm
