// The embeddings of P-tuning's virtual tokens, as its encoder makes them of the trained tensors: the one
// tensor that peft's files have. On the host in fp32, each product's sum in fp64, so that a checkpoint and an
// export have the same bits whatever device trained them. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lm {

struct EncoderShape {
  int64_t tokens = 0, width = 0, hidden = 0;
};

// Reads elements [first, first + elements) of a tensor of the encoder, by its name in checkpoints
// (spec/parameter.h, kEncoderPrefix).
using ReadEncoder = std::function<void(const std::string& name, int64_t first, int64_t elements, float* out)>;

// [tokens, width]. Holds at most 4 MiB of a matrix, or a row, at once.
std::vector<float> encoded_prompt(const EncoderShape& shape, const ReadEncoder& read);

}  // namespace lm
