"""Keeps the include rules of the design true: reads the #include lines of src/, offload/, comm/ and launcher/ and checks
who may include whom, who may see torch and CUDA, and that no file or function has grown past what can be held in the head.

Run: python tests/layering_test.py [ROOT]. Prints one line per breach and exits 1 if there is any.
"""

import re
import sys
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

# Folder -> what it may include (besides itself). Kept in the order of the design's table.
MAY_INCLUDE = {
    "src/base": set(),
    "src/optim/rules": {"src/base"},  # what an optimizer is: whoever plans, configures or computes reads it
    "src/config": {"src/base", "src/optim/rules"},
    "src/spec": {"src/base"},
    "src/schedule": {"src/base", "src/config", "src/spec"},
    "offload": {"src/base"},
    "comm": {"src/base", "offload"},
    "src/kernels": {"src/base", "src/optim/rules"},
    "src/model": {"src/base", "src/config", "src/spec", "src/kernels", "src/schedule"},
    "src/plan": {"src/base", "src/config", "src/spec", "src/kernels", "src/schedule", "src/model", "src/optim/rules"},
    "src/data": {"src/base", "src/config"},
    "src/weights": {"src/base", "src/spec", "src/kernels", "src/plan", "src/model", "comm", "offload"},
    "src/export": {"src/base", "src/spec", "src/weights"},
    "src/optim": {"src/base", "src/optim/rules", "src/config", "src/spec", "src/plan", "src/kernels", "comm", "offload"},
    "src/checkpoint": {"src/base", "src/config", "src/spec", "src/plan", "src/weights", "src/optim", "comm", "offload"},
}
EVERYTHING_BELOW = set(MAY_INCLUDE)
MAY_INCLUDE["src/train"] = EVERYTHING_BELOW
# What CLI process and rank share. An adapter's configuration is read by src/weights, strictly and once.
MAY_INCLUDE["launcher"] = {"src/base", "src/config", "src/spec", "src/plan", "src/weights", "src/data"}
MAY_INCLUDE["launcher/machine"] = {"launcher", "src/base", "src/config", "src/plan", "offload"}
MAY_INCLUDE["launcher/report"] = {"launcher", "src/base", "src/config", "src/spec"}
MAY_INCLUDE["launcher/serve"] = {"src/base", "src/data"}
MAY_INCLUDE["launcher/cli"] = MAY_INCLUDE["launcher/machine"] | MAY_INCLUDE["launcher"] | {"launcher/machine", "launcher/report", "src/schedule", "comm"}
MAY_INCLUDE["launcher/worker"] = EVERYTHING_BELOW | {"src/train", "launcher", "launcher/machine", "launcher/report", "launcher/serve"}

# The files that LibTorch stands behind: products and attention, views for it, how it is started, what it throws.
SEES_TORCH = re.compile(r"src/kernels/(aten|library|library_error|attention_chunks|attention_cuda|gemm_cuda|gemm_rate|runtime_cpu|runtime_cuda)\.")
SEES_CUDA = {"offload", "comm"}

TORCH = re.compile(r"^(torch|ATen|c10)/")
CUDA = re.compile(r"^(cuda|cublas|cudnn|cupti|curand|nccl|nvtx|cub/|thrust/|cooperative_groups|mma\.h|ATen/cuda|c10/cuda)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def folder_of(path):
    """The row of the table that a file (relative, posix) belongs to, or None."""
    parts = path.split("/")
    for depth in (3, 2, 1):  # a room of a folder may have a row of its own
        if (name := "/".join(parts[:depth])) in MAY_INCLUDE and len(parts) > depth:
            return name
    return None


def may_see_cuda(path, folder):
    if folder == "src/base":
        return "cuda" in Path(path).name
    if folder == "src/kernels":
        return path.endswith((".cu", ".cuh")) or SEES_TORCH.match(path) is not None
    return folder in SEES_CUDA


def resolve(root, path, name):
    """The repository's file that `#include "name"` in `path` means, relative to the root; None if it is not ours."""
    for base in (Path(path).parent, Path("src"), Path(".")):
        if (root / base / name).is_file():
            return (root / base / name).resolve().relative_to(root).as_posix()
    return None


def include_breaches(root, path, text):
    folder = folder_of(path)
    if folder is None:
        yield f"{path}: its folder has no row in the design's table of who may include whom"
        return
    for match in INCLUDE.finditer(text):
        name, line = match[2], text.count("\n", 0, match.start()) + 1
        if CUDA.match(name):
            if not may_see_cuda(path, folder):
                yield f"{path}:{line}: {folder} may not see CUDA: {name}"
        if TORCH.match(name):
            if not SEES_TORCH.match(path):
                yield f"{path}:{line}: {folder} may not see torch: {name}"
        target = resolve(root, path, name) if match[1] == '"' else None
        if match[1] == '"' and target is None:
            yield f"{path}:{line}: {name} is not in this repository: write <{name}>"
        if target is None:
            continue
        to = folder_of(target)
        if to != folder and to not in MAY_INCLUDE[folder]:
            yield f"{path}:{line}: {folder} may not include {to}: {name}"


def blank_comments_and_strings(text):
    """The same text with comments, strings and character literals as blanks, line breaks kept."""
    token = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'', re.S)
    return token.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def parameters(head, begin):
    """How many parameters the list has that begins at `begin`, behind its parenthesis."""
    depth, commas, some = 0, 0, False
    for i in range(begin, len(head)):
        if head[i] in "([{" or head[i] == "<":
            depth += 1
        elif head[i] in ")]}" or (head[i] == ">" and head[i - 1] != "-"):
            if depth == 0:
                break
            depth -= 1
        commas += head[i] == "," and depth == 0
        some = some or not head[i].isspace()
    return commas + some


def functions(text):
    """(first line, length in lines, name, parameters) of every function body, approximately: a brace at namespace or class level
    that follows a parameter list."""
    text = re.sub(r"^\s*#.*(?:\\\n.*)*$", lambda m: re.sub(r"[^\n]", " ", m[0]), blank_comments_and_strings(text), flags=re.M)
    stack, start = [], 0  # kinds of the open braces; where the text after the last brace or semicolon begins
    for match in re.finditer(r"[{};]", text):
        inside = any(kind[0] == "function" for kind in stack)
        if match[0] == "{":
            head = text[start:match.start()]
            if inside or not re.search(r"\)[\s\w:&<>,*()\[\]-]*$", head) or re.search(r"\b(namespace|enum)\b[^()]*$", head):
                kind = ("other", 0, "")
            else:
                plain = re.sub(r"template\s*<[^()]*?>\s*(?=[\w\[])|\[\[[^\]]*\]\]", lambda m: " " * len(m[0]), head)
                name = re.search(r"([\w~:]+|operator\W+)\s*\(", plain)
                first = text.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
                kind = ("function", first, name[1] if name else "?", parameters(plain, name.end()) if name else 0)
            stack.append(kind)
        elif match[0] == "}" and stack:
            kind = stack.pop()
            if kind[0] == "function":
                yield kind[1], text.count("\n", 0, match.start()) + 2 - kind[1], kind[2], kind[3]
        if not any(kind[0] == "function" for kind in stack):
            start = match.end()


def size_breaches(path, text):
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, at most {MAX_FILE_LINES}: split it"
    product = not path.startswith(("tests/", "benchmarks/"))
    for line, length, name, count in functions(text):
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{line}: {name} has {length} lines, at most {MAX_FUNCTION_LINES}: split it"
        if count > MAX_PARAMETERS and product:
            yield f"{path}:{line}: {name} has {count} parameters, at most {MAX_PARAMETERS}: group them in a struct"


def cycle(graph):
    """A cycle of the graph {node: nodes} as a list that ends with its first node; [] if there is none."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node):] + [node]
        if node in done:
            return []
        path.append(node)
        for after in sorted(graph.get(node, ())):
            if found := visit(after):
                return found
        done.add(path.pop())
        return []

    return next((found for node in sorted(graph) if (found := visit(node))), [])


def cycle_breaches(includes):
    """`includes`: file -> files of ours that it includes. Neither files nor the folders of the table may include in a circle."""
    for what, graph in (("the table of who may include whom", MAY_INCLUDE), ("files", includes)):
        if found := cycle(graph):
            yield f"{what}: includes in a circle: {' -> '.join(found)}"


# A kind of norm or activation is an enumeration, and who depends on it switches over it: the compiler then finds what a new kind
# concerns. So there is such a switch where its formulas are, and no `default:` hides a missing case. (A mixer is a type, which a
# variant holds: the compiler finds who does not visit it.)
KIND_HEADERS = ("src/spec/layer_spec.h", "src/spec/norm_spec.h", "src/spec/mixers/attention.h", "src/base/activation.h")
KINDS = {
    "NormKind": ("src/model/norm.cpp",),
    "Activation": ("src/kernels/activation_formula.h",),
}


def kind_breaches(read):
    """`read`: path -> text."""
    declared = {kind for path in KIND_HEADERS for kind in re.findall(r"enum class (\w+)\b", read(path))}
    for kind in sorted(declared ^ set(KINDS)):
        yield f"tests/layering_test.py: KINDS and {', '.join(KIND_HEADERS)} disagree about {kind}"
    for kind, paths in KINDS.items():
        for path in paths:
            text = blank_comments_and_strings(read(path))
            switches = re.findall(r"switch \([^{]*\) \{(.*?)\n *\}\n", text, re.S)
            mine = [s for s in switches if f"case {kind}::" in s]
            if not mine:
                yield f"{path}: no switch over {kind}"
            if any("default:" in s for s in mine):
                yield f"{path}: a switch over {kind} has a default, which hides a kind that is missing"


# A tier of memory is a row of src/base/tiers.inc: code asks its row or compares positions. The GPU's memory and the host's may be
# named, where just that one is meant; the others only where the plan asks what a machine has of each.
NAMED_TIER = re.compile(r"\b(?:TierId|OffloadTier)::k(?!Device\b|Host\b|Auto\b|None\b)\w+|\bOffloadTier::kHost\b")
NAMES_TIERS = {"src/plan/tier_space.cpp"}


def tier_breaches(path, text):
    if path in NAMES_TIERS:
        return
    text = blank_comments_and_strings(text)
    for match in NAMED_TIER.finditer(text):
        yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: names the tier {match[0]}: ask its row (src/base/tier.h)"


def self_test():
    """The checks find what they are for, so that silence means something."""
    body = "  work();\n" * 90
    text = 'namespace lm {\nstruct A {\n  int size() const { return 1; }\n};\nint big(int x) {\n' + body + "}\n}\n"
    found = list(functions(text))
    assert [(name, length, count) for _, length, name, count in found] == [("size", 1, 0), ("big", 92, 1)], found
    many = "[[gnu::always_inline]] inline int many(std::map<int, int> a, int (*b)(int, int), int c, int d, int e, int f"
    assert not list(size_breaches("src/base/a.cpp", many + ") {\n}\n"))
    assert any("7 parameters" in b for b in size_breaches("src/base/a.cpp", many + ", int g = h(1, 2)) {\n}\n"))
    assert list(size_breaches("src/base/a.cpp", text)) != []
    root = Path(__file__).resolve().parent.parent
    assert any("torch" in b for b in include_breaches(root, "src/plan/a.h", "#include <ATen/ATen.h>\n"))
    assert any("CUDA" in b for b in include_breaches(root, "src/kernels/a.h", "#include <cuda_runtime.h>\n"))
    assert any("may not include src/spec" in b
               for b in include_breaches(root, "src/base/a.h", '#include "spec/parameter.h"\n'))
    assert any("may not include src/plan" in b
               for b in include_breaches(root, "src/schedule/a.h", '#include "plan/plan.h"\n'))
    assert any("torch" in b for b in include_breaches(root, "launcher/cli/a.h", "#include <ATen/ATen.h>\n"))
    assert any("may not include launcher/worker" in b
               for b in include_breaches(root, "launcher/cli/a.h", '#include "launcher/worker/job.h"\n'))
    assert not list(include_breaches(root, "src/spec/a.h", '#include "base/error.h"\n#include <vector>\n'))
    kinds = {"src/spec/norm_spec.h": "enum class NormKind {};\nenum class RouterKind {};\n",
             "src/kernels/activation_formula.h": "  switch (a) {\n    case Activation::kA:\n    default:\n  }\n"}
    found = list(kind_breaches(lambda path: kinds.get(path, "  rms_norm();\n")))
    assert len(found) == 4 and any("default" in b for b in found) and any("no switch over NormKind" in b for b in found), found
    tiers = "if (a == TierId::kNvme || b == OffloadTier::kHost) work(TierId::kHost, OffloadTier::kAuto);  // TierId::kNvme\n"
    assert len(list(tier_breaches("src/plan/a.cpp", tiers))) == 2 and not list(tier_breaches("src/plan/tier_space.cpp", tiers))
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert list(cycle_breaches({"a.h": {"b.h"}, "b.h": {"a.h"}})) != []


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    self_test()
    breaches, files, includes = [], 0, {}
    for top in ("src", "offload", "comm", "launcher", "tests", "benchmarks"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            files += 1
            path, text = file.relative_to(root).as_posix(), file.read_text()
            breaches += size_breaches(path, text)
            if top not in ("tests", "benchmarks"):
                breaches += include_breaches(root, path, text)
                breaches += tier_breaches(path, text)
                ours = (resolve(root, path, match[2]) for match in INCLUDE.finditer(text) if match[1] == '"')
                includes[path] = {target for target in ours if target}
    breaches += cycle_breaches(includes)
    breaches += kind_breaches(lambda path: (root / path).read_text())
    print("\n".join(breaches + [f"{files} files, {len(breaches)} breaches of the design's rules"]))
    return 1 if breaches or not files else 0


if __name__ == "__main__":
    sys.exit(main())
