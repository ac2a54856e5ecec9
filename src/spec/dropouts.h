// Dropouts that a model's config.json asks for and that training here leaves out, since its family's
// published files name them and the model is the same without. Torch-free; any thread.
#pragma once

#include <string>
#include <vector>

namespace lm {

// "resid_pdrop = 0.1", ... of a config.json's text; empty: none. Throws as parse_model_spec does.
std::vector<std::string> dropouts_left_out(const std::string& json, const std::string& place);

}  // namespace lm
