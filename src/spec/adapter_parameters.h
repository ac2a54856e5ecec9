// The tensors that an adapter adds to the model's, block by block, for list_parameters (parameter.h). Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/model_spec.h"
#include "spec/parameter.h"

namespace lm {

// A parameter of one tensor of the files, `hf`.
Parameter single(const std::string& name, ParameterKind kind, const std::string& hf, int64_t rows,
                 int64_t columns = 1);

// What an adapter has in a block with these parameters; kNoLayer: the head's.
std::vector<Parameter> block_adapters(const ModelSpec& spec, const AdapterSpec* adapter, int64_t layer,
                                      const std::vector<Parameter>& base);
// Frozen, beside the trained pairs.
std::vector<Parameter> block_starts(const ModelSpec& spec, const AdapterSpec* adapter, int64_t layer);
// What an adapter has in the embedding's block: a prompt and its encoder, pairs of the table, or the rows of
// lora.tokens.
std::vector<Parameter> embedding_adapters(const ModelSpec& spec, const AdapterSpec* adapter);
// Beside an adapter: the base's matrices that are trained whole, the adapter, and then what has no decay, the
// base's vectors that are trained. The others are frozen. A head of scores is always trained.
void split_base(const ModelSpec& spec, const AdapterSpec& adapter, std::vector<Parameter>&& base,
                std::vector<Parameter>&& adapters, BlockParameters& block);

}  // namespace lm
