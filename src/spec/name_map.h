// How the files of a family call its tensors, in both directions: the names of a parameter of ours, and what
// a name in a file means. Values; whoever fills one makes its texts live as long as the program.
#pragma once

#include <string_view>
#include <vector>

namespace lm {

// A linear layer of a file, "<path>.weight" and "<path>.bias": parts of one matrix of ours (MatrixSpec),
// several neighbours if the family's files have them joined.
struct ModuleName {
  // In its layer; of experts with a * for the expert's number. Behind the last point the * means that the
  // files have one tensor for all experts, "<what stands before>.weight", [experts, rows, columns], and
  // "<what stands before>.bias", [experts, rows], where these have biases.
  const char* path = "";
  const char* first = "";      // "attn.q"
  const char* last = nullptr;  // null: the first is the only one
  bool transposed = false;     // the files hold the matrix as [in, out]
  // Of a tensor of all experts: what stands behind its path in place of ".weight" and ".bias".
  const char* weight = ".weight";
  const char* bias = ".bias";
  // Of a tensor of all experts, where the family's files can also have each expert's matrices by themselves:
  // the ends of their paths, "gate_proj".
  std::vector<const char*> each = {};
};

// A vector of a layer that is a whole tensor of the files.
struct VectorName {
  const char* ours = "";  // "attn.sinks"
  const char* path = "";  // its name, in its layer
};

// A norm of a layer; its weight and bias.
struct NormName {
  const char* ours = "";  // "attn.norm"
  const char* path = "";  // what stands before ".weight" and ".bias", in its layer
};

// Of vocabulary matrices and the last norm: what stands before ".weight" and ".bias". A layer's names follow
// `layers`, the layer's number and a dot.
struct NameMap {
  const char* embedding = "";
  const char* positions = "";  // of learned ones
  const char* layers = "";
  std::vector<NormName> norms;      // in a layer
  std::vector<ModuleName> modules;  // every part once, in order
  // In a layer, the module whose parameters transformers 5 holds the matrices of all experts in, gate_up_proj
  // and down_proj: pairs of experts have names by these (spec/expert_adapters.h). "": experts have no pairs.
  const char* experts = "";
  std::vector<VectorName> vectors = {};  // in a layer
  const char* input_table = "";          // of layers' inputs, as the next two
  const char* input_projection = "";
  const char* input_norm = "";
  const char* norm = "";  // the last one
  const char* head = "";
};

// Whether a matrix of each expert has a path in the family's files that ends so.
bool names_each_expert(const NameMap& names, std::string_view last);

// Llama's names, which most families took over.
NameMap llama_names();

}  // namespace lm
