// LoRA's products on a GPU, where they are bound by memory: an adapter's product comes before its base's,
// whose epilogue then adds what it finds (beta = 1), so that y and dx are written once before they are read
// again; A's of one matrix are one product, which reads x once; scales are factors of products. On a CPU
// products follow peft's order (model/linear.cpp), whose roundings recorded runs have. One layer's calls.
#pragma once

#include "model/linear.h"

namespace lm {

// Whether the linear's adapters are computed so: not of another type than the model (their sums are rounded
// apart), nor with trained lengths of rows or a frozen pair.
bool products_first(const Context& context, const Linear& linear);
// Of these, whether every row of the matrix has an adapter: y then begins with what they add.
bool outputs_first(const Context& context, const Linear& linear);
// Whether A drop(x) of all adapters lie side by side, as one product makes them: without dropout x is the
// same for all.
bool reduces_together(const Context& context, const Linear& linear);

// Memory for them in the arena, one view for each adapter; `together`: becomes all of it.
std::vector<View> allocate_reduced(const Context& context, const Linear& linear, int64_t rows,
                                   View* together);
// `reduced`, that memory, becomes A x of all.
void reduce_together(const Context& context, const Linear& linear, const View& x, const View& reduced);

// Backward, in three parts; x is needed by the last alone. s dy B of all adapters, side by side, in the
// arena.
View reduced_gradients(const Context& context, const Linear& linear, const View& dy);
// dx = what the adapters give it; the base's product is to be added.
void begin_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                          const View& dreduced, const View& dx);
// The gradients of A and B.
void add_adapter_gradients(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           const LinearBackward& pass, const LinearSaved& saved,
                           const ReducedGradients& reduced);

}  // namespace lm
