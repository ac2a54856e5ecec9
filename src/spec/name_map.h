// How the files of a family call its tensors, in both directions: the names of a parameter of ours, and what
// a name in a file means. Values; whoever fills one makes its texts live as long as the program.
#pragma once

#include <cstdint>
#include <vector>

namespace lm {

// The parts of our four projections, in row order: qkv, out, gate_up, down.
enum class LinearPart : uint8_t { kQ, kK, kV, kOut, kGate, kUp, kDown };

// A linear layer of a file, "<path>.weight" and "<path>.bias": neighbouring parts of one projection of ours,
// several if the family's files have them joined.
struct ModuleName {
  const char* path = "";  // in its layer
  LinearPart first = LinearPart::kQ, last = LinearPart::kQ;
};

// Of norms and of vocabulary matrices: what stands before ".weight". A layer's names follow `layers`, the
// layer's number and a dot.
struct NameMap {
  const char* embedding = "";
  const char* layers = "";
  const char* attention_norm = "";
  const char* mlp_norm = "";
  const char* q_norm = "";
  const char* k_norm = "";
  std::vector<ModuleName> modules;  // every part once, in order
  const char* norm = "";            // the last one
  const char* head = "";
};

// Llama's names, which most families took over.
NameMap llama_names();

}  // namespace lm
