// Virtual tokens: where a run has them, every document of a batch begins with the same number of rows whose
// tokens mean nothing (data/loader.h makes room for them). Trained values take the place of what the model
// computes there: keys and values of each layer (prefix tuning), or embeddings (prompt tuning).
#pragma once

#include "model/linear.h"

namespace lm {

// The keys of a layer's virtual tokens, and behind them their values.
struct Prefix {
  Param rows;  // [n, 2 n_kv d]; undefined: the run has none
};

// Row i of `values`, times `factor`, replaces the i-th row of each document in x [T, columns]. Nothing if
// `values` is undefined.
void put_virtual_rows(const Context& context, const Param& values, const DeviceBatch& batch, const View& x,
                      float factor = 1);

// Whether the batch has a row for any of `all` virtual tokens: a text that is continued has them in its
// cache.
bool has_virtual_rows(const DeviceBatch& batch, int64_t all);

// Of dx [T, columns] the rows of `all` virtual tokens, times `factor`, summed over the documents in their
// order: fp32 [all, columns], in the arena. These rows of dx become zero, since what the model computed there
// is not used.
View take_virtual_rows(const Context& context, int64_t all, const DeviceBatch& batch, const View& dx,
                       float factor = 1);

// The gradient of `values` from that of x, whose rows it takes. `first`: the gradient's memory has no value
// yet. Nothing if `values` has no gradient.
void take_virtual_gradient(const Context& context, const Param& values, const DeviceBatch& batch,
                           const View& dx, bool first, float factor = 1);

}  // namespace lm
