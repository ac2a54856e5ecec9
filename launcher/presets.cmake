# Writes OUT, a C++ file with the texts that `lmlaunch presets` prints and `lmlaunch plan` knows without files: every
# configs/*.toml, and the config.json of every model that these name (configs/models/ORG--NAME.json).
#   cmake -DOUT=presets_text.cpp -DPRESETS="a.toml;b.toml" -DMODELS="ORG--NAME.json" -P presets.cmake
function(list_texts out files)
  set(rows "")
  foreach(file ${files})
    get_filename_component(name ${file} NAME_WLE)
    string(REPLACE "--" "/" name ${name})
    file(READ ${file} text)
    string(APPEND rows "    {\"${name}\", R\"preset(${text})preset\"},\n")
  endforeach()
  set(${out} "${rows}" PARENT_SCOPE)
endfunction()

list_texts(presets "${PRESETS}")
list_texts(models "${MODELS}")
file(WRITE ${OUT}
"#include \"launcher/presets.h\"

namespace lm {

const std::vector<Preset>& presets() {
  static const std::vector<Preset> kPresets = {
${presets}  };
  return kPresets;
}

const std::vector<ModelShape>& model_shapes() {
  static const std::vector<ModelShape> kShapes = {
${models}  };
  return kShapes;
}

}  // namespace lm
")
