#include "train/decoder.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/error.h"

namespace lm {
namespace {

std::span<const int32_t> first_part(std::span<const int32_t> tokens, int64_t most) {
  return tokens.first(static_cast<size_t>(std::min(std::ssize(tokens), most)));
}

}  // namespace

Decoder::Decoder(const Context& context, const Size& size)
    : context_(context),
      virtual_tokens_(size.virtual_tokens),
      logits_(context.device, generated_logit_rows(size.texts) * context.spec.vocab *
                                  static_cast<int64_t>(dtype_size(context.dtype))),
      host_logits_(static_cast<size_t>(logits_.size())),
      floats_(static_cast<size_t>(generated_logit_rows(size.texts) * context.spec.vocab)) {
  LM_CHECK(virtual_tokens_ < size.positions, "a text has room beside the virtual tokens");
  caches_.reserve(static_cast<size_t>(size.texts));
  for (int64_t text = 0; text < size.texts; ++text)
    caches_.emplace_back(context.spec, size.positions, context.dtype, context.device);
}

View Decoder::row_view(int64_t rows) const {
  return view_of(logits_.data(), context_.dtype, rows, context_.spec.vocab);
}

std::span<const float> Decoder::read(int64_t rows) {
  const View view = row_view(rows);
  copy_bytes(host_logits_.data(), view.data, view.bytes(), context_.stream);
  synchronize(context_.stream);
  kernels(DeviceType::kCpu)
      .accumulate({.to = floats_.data(),
                   .from = host_logits_.data(),
                   .elements = view.elements(),
                   .to_dtype = DType::kF32,
                   .from_dtype = context_.dtype,
                   .overwrite = true},
                  StreamView{});
  return std::span(floats_).first(static_cast<size_t>(view.elements()));
}

void Decoder::begin_text(TrainStep& step, KeyValueCache& cache) {
  cache.set_tokens(0);
  // Any token will do.
  const std::vector<int32_t> tokens(static_cast<size_t>(std::min(virtual_tokens_, kPromptTokens)), 0);
  while (cache.tokens() < virtual_tokens_) {
    const TrainStep::Continuation some{&cache, first_part(tokens, virtual_tokens_ - cache.tokens())};
    step.extend({&some, 1}, row_view(1));
    synchronize(context_.stream);  // the upload buffer has been read
  }
}

std::span<const float> Decoder::logits(TrainStep& step, std::span<const int32_t> text) {
  KeyValueCache& cache = caches_.front();
  LM_CHECK(!text.empty() && std::ssize(text) <= positions(), fmt::format("{} tokens", text.size()));
  // The common prefix is cached; the last token must run for its logits.
  const auto differ = std::mismatch(text.begin(), text.end() - 1, text_.begin(), text_.end());
  text_.erase(differ.second, text_.end());
  if (text_.empty()) begin_text(step, cache);
  cache.set_tokens(virtual_tokens_ + std::ssize(text_));
  while (std::ssize(text_) < std::ssize(text)) {
    const TrainStep::Continuation some{&cache, first_part(text.subspan(text_.size()), kPromptTokens)};
    step.extend({&some, 1}, row_view(1));
    text_.insert(text_.end(), some.tokens.begin(), some.tokens.end());
    if (std::ssize(text_) < std::ssize(text))
      synchronize(context_.stream);  // the upload buffer has been read
  }
  return read(1);
}

std::span<const float> Decoder::begin(TrainStep& step, int64_t number, std::span<const int32_t> prompt,
                                      const RowVisitor& each) {
  KeyValueCache& cache = caches_[static_cast<size_t>(number)];
  LM_CHECK(!prompt.empty() && std::ssize(prompt) <= positions(), fmt::format("{} tokens", prompt.size()));
  LM_CHECK(!each || texts() > 1, "the logits of several tokens have memory");
  if (number == 0) text_.clear();
  begin_text(step, cache);
  std::span<const float> rows;
  for (int64_t done = 0; done < std::ssize(prompt);) {
    const TrainStep::Continuation some{
        &cache, first_part(prompt.subspan(static_cast<size_t>(done)), each ? kScoredTokens : kPromptTokens)};
    const int64_t count = each ? std::ssize(some.tokens) : 1;
    step.extend({&some, 1}, row_view(count));
    rows = read(count);  // waits, so that the upload buffer has been read
    const auto vocab = static_cast<size_t>(context_.spec.vocab);
    for (int64_t row = 0; each && row < count; ++row)
      each(done + row, rows.subspan(static_cast<size_t>(row) * vocab, vocab));
    rows = rows.last(vocab);
    done += std::ssize(some.tokens);
  }
  return rows;
}

std::span<const float> Decoder::next(TrainStep& step, std::span<const Next> tokens) {
  LM_CHECK(!tokens.empty() && std::ssize(tokens) <= texts(), fmt::format("{} texts", tokens.size()));
  std::vector<TrainStep::Continuation> some;
  for (const Next& one : tokens) {
    KeyValueCache& cache = caches_[static_cast<size_t>(one.text)];
    LM_CHECK(cache.tokens() < cache.positions(), "the text has room for a token");
    if (one.text == 0) text_.clear();
    some.push_back({&cache, {&one.token, 1}});
  }
  step.extend(some, row_view(std::ssize(tokens)));
  return read(std::ssize(tokens));
}

}  // namespace lm
