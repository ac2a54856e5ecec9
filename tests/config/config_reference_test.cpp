#include "config/config_reference.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "config/config_print.h"

namespace lm {
namespace {

std::vector<KeyDoc> documented() {
  std::vector<KeyDoc> out;
  for (const TableDoc& table : config_reference())
    out.insert(out.end(), table.keys.begin(), table.keys.end());
  return out;
}

const KeyDoc& doc_of(const std::vector<KeyDoc>& keys, const std::string& full) {
  const auto found = std::ranges::find_if(keys, [&](const KeyDoc& key) { return key.full() == full; });
  EXPECT_NE(found, keys.end()) << full;
  return *found;
}

TEST(ConfigReference, HasEveryKeyWithItsDefault) {
  const std::vector<KeyDoc> keys = documented();
  for (const KeyText& key : list_keys(Config())) {
    const auto same = [&](const KeyDoc& doc) {
      return doc.table == key.table && doc.name == key.name &&
             (doc.value == key.value || doc.value == "must be set");
    };
    EXPECT_TRUE(std::ranges::any_of(keys, same)) << key.table << "." << key.name << " = " << key.value;
  }
  for (const KeyDoc& key : keys) {
    EXPECT_FALSE(key.help.empty() || key.accepts.empty()) << key.full();
  }
}

TEST(ConfigReference, NamesTheOptimizersThatShareAKeyOnce) {
  const std::vector<KeyDoc> keys = documented();
  EXPECT_EQ(doc_of(keys, "optimizer.betas").rules,
            "adamw, adamw_8bit, adamw_4bit, adamw_fp8, muon, adamw_bf16, adamw_anyprecision");
  EXPECT_EQ(doc_of(keys, "optimizer.lr").rules, "");
  EXPECT_EQ(doc_of(keys, "optimizer.name").choices.size(), std::size(Rules::kTexts));
}

TEST(ConfigReference, SaysWhatAResumedRunMayChange) {
  const std::vector<KeyDoc> keys = documented();
  EXPECT_NE(
      key_text(doc_of(keys, "optimizer.lr")).find("at resume  refused unless --override optimizer.lr\n"),
      std::string::npos);
  EXPECT_NE(key_text(doc_of(keys, "model.dtype")).find("at resume  refused\n"), std::string::npos);
  EXPECT_NE(key_text(doc_of(keys, "io.depth")).find("at resume  allowed: same result"), std::string::npos);
  EXPECT_NE(key_text(doc_of(keys, "data.eval")).find("except with the schedule reduce_lr_on_plateau"),
            std::string::npos);
}

TEST(ConfigReference, ThePageHasARowForEveryKey) {
  const std::string page = reference_page();
  for (const KeyDoc& key : documented()) {
    EXPECT_NE(page.find("| `" + key.full() + "` | "), std::string::npos) << key.full();
  }
  EXPECT_EQ(page.find("\n\n\n"), std::string::npos);
}

}  // namespace
}  // namespace lm
