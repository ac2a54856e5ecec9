// Keys of data sets: entries of data.train, as other files describe them (carry_data.cpp).
#pragma once

#include <nlohmann/json.hpp>

#include "config/words/draft.h"

namespace lm {

void carry_source_type(const nlohmann::json& value, Draft& draft);
void carry_source_messages(const nlohmann::json& value, Draft& draft);
void carry_source_split(const nlohmann::json& value, Draft& draft);
// A list, names with commas, or a table of name = weight; LLaMA-Factory's are files of dataset_dir.
void carry_sources(const nlohmann::json& value, Draft& draft);
void carry_tune_data(const nlohmann::json& value, Draft& draft);
// A part of the present entry: its name, files, text column or weight; or names of evaluation data.
void carry_source_part(const Word& word, const nlohmann::json& value, Draft& draft);

}  // namespace lm
