#include "config/words/carry_data.h"

#include <string>

#include "config/words/values.h"

namespace lm {

using Json = nlohmann::json;

void carry_source_type(const Json& value, Draft& draft) {
  ForeignSource& source = draft.source();
  draft.done = true;
  if (value.is_object()) {
    source.format = "alpaca";
    const std::pair<const char*, const char*> fields[] = {{"field_instruction", "instruction"},
                                                          {"field_input", "input"},
                                                          {"field_output", "output"},
                                                          {"field_system", "system"}};
    for (const auto& [theirs, ours] : fields) {
      if (value.contains(theirs) && value[theirs].is_string() && value[theirs] != ours)
        source.columns[ours] = value[theirs].get<std::string>();
    }
    return draft.missing("the columns are taken; how they are joined is the chat template's or alpaca's");
  }
  const std::string name = lower(text_of(value)), kind = name.substr(0, name.find_first_of(".:"));
  if (contains(name, "bradley_terry") || contains(name, "dpo") || contains(name, "stepwise"))
    draft.refuse("data of type \"" + name + "\" is for preference tuning or reward models");
  if (kind == "alpaca" || kind == "alpaca_chat") {
    source.format = "alpaca";
  } else if (kind == "completion" || kind == "pretrain") {
    source.format = "text";
  } else if (kind == "chat_template" && source.columns.empty()) {
    source.format = "chat";
  } else if (kind == "sharegpt") {
    source.format = "sharegpt";
  } else if (kind != "chat_template" && !is_off(value)) {
    draft.missing("prompts of type \"" + name + "\": columns are recognised by name");
  }
}

void carry_source_messages(const Json& value, Draft& draft) {
  const std::string field = text_of(value);
  draft.done = true;
  if (field == "conversations") {
    draft.source().format = "sharegpt";
  } else if (field != "messages" && !is_off(value)) {
    draft.source().columns["messages"] = field;
  }
}

void carry_source_split(const Json& value, Draft& draft) {
  const std::string split = text_of(value);
  if (split == "train" || is_off(value)) return draft.unneeded("the train split is taken");
  draft.missing("\"" + split + "\": the train split is taken whole; name files for a part");
}

void carry_sources(const Json& value, Draft& draft) {
  if (is_off(value)) return;
  draft.done = true;
  const auto add = [&](const std::string& name, std::optional<double> weight) {
    const bool bare =
        draft.project == Project::kLlamaFactory && name.find_first_of("./") == std::string::npos;
    draft.sources.push_back({.name = bare ? "data/" + name + ".json" : name,
                             .files = {},
                             .format = "",
                             .columns = {},
                             .weight = weight});
  };
  if (value.is_object()) {
    for (const auto& [name, weight] : value.items()) add(name, as_number(weight));
  } else {
    for (const std::string& name : names_of(value)) add(name, std::nullopt);
  }
}

void carry_tune_data(const Json& value, Draft& draft) {
  const std::string name = last_of(text_of(value));
  const std::pair<const char*, const char*> known[] = {
      {"alpaca_dataset", "tatsu-lab/alpaca"},
      {"alpaca_cleaned_dataset", "yahma/alpaca-cleaned"},
      {"samsum_dataset", "Samsung/samsum"},
      {"slimorca_dataset", "Open-Orca/SlimOrca-Dedup"},
      {"wikitext_dataset", "EleutherAI/wikitext_document_level"}};
  draft.done = true;
  for (const auto& [theirs, ours] : known) {
    if (name == theirs && draft.source().name.empty()) draft.source().name = ours;
  }
  if (contains(name, "multimodal") || contains(name, "preference"))
    draft.refuse("data of kind \"" + name + "\" is not read");
  if (name.starts_with("alpaca")) draft.source().format = "alpaca";
  if (name.starts_with("text_completion") || name.starts_with("wikitext")) draft.source().format = "text";
}

void carry_source_part(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  switch (word.how) {
    case How::kSourceName:
      draft.source().name = text_of(value);
      break;
    case How::kSourceFiles:
      draft.source().files = names_of(value);
      break;
    case How::kSourceField:
      if (text_of(value) != "text") draft.source().columns["text"] = text_of(value);
      break;
    case How::kSourceWeight:
      draft.source().weight = as_number(value);
      break;
    default:
      for (const std::string& name : names_of(value)) {
        const bool bare =
            draft.project == Project::kLlamaFactory && name.find_first_of("./") == std::string::npos;
        draft.eval.push_back(bare ? "data/" + name + ".json" : name);
      }
  }
  draft.done = true;
}

}  // namespace lm
