#include "train/decoder.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/error.h"

namespace lm {

Decoder::Decoder(const Context& context, int64_t positions)
    : context_(context),
      cache_(context.spec, positions, context.dtype, context.device),
      logits_(context.device, context.spec.vocab * static_cast<int64_t>(dtype_size(context.dtype))),
      host_logits_(static_cast<size_t>(logits_.size())),
      floats_(static_cast<size_t>(context.spec.vocab)) {}

std::span<const float> Decoder::logits(TrainStep& step, std::span<const int32_t> text) {
  LM_CHECK(!text.empty() && std::ssize(text) <= positions(), fmt::format("{} tokens", text.size()));
  // The common prefix is cached; the last token must run for its logits.
  const auto differ = std::mismatch(text.begin(), text.end() - 1, text_.begin(), text_.end());
  text_.erase(differ.second, text_.end());
  cache_.set_tokens(std::ssize(text_));
  const int64_t vocab = context_.spec.vocab;
  const View out = view_of(logits_.data(), context_.dtype, 1, vocab);
  while (std::ssize(text_) < std::ssize(text)) {
    const auto some =
        text.subspan(text_.size())
            .first(static_cast<size_t>(std::min(std::ssize(text) - std::ssize(text_), kPromptTokens)));
    step.extend(cache_, some, out);
    text_.insert(text_.end(), some.begin(), some.end());
    if (std::ssize(text_) < std::ssize(text))
      synchronize(context_.stream);  // the upload buffer has been read
  }
  copy_bytes(host_logits_.data(), out.data, out.bytes(), context_.stream);
  synchronize(context_.stream);
  kernels(DeviceType::kCpu)
      .accumulate({.to = floats_.data(),
                   .from = host_logits_.data(),
                   .elements = vocab,
                   .to_dtype = DType::kF32,
                   .from_dtype = context_.dtype,
                   .overwrite = true},
                  StreamView{});
  return floats_;
}

}  // namespace lm
