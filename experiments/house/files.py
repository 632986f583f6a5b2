# ruff: noqa
"""Second part of move.sh: files move and merge by rooms.py, and every mention of them is rewritten."""

import ast, re, subprocess, sys, pathlib, collections, importlib
from rooms import T, GONE, RENAME, INIT

DOC = {}
tree = pathlib.Path(__file__).resolve().parents[2]
root = tree / "zpp_lab"
T = {k: [s for s in v if (root / s).exists()] for k, v in T.items()}
T = {k: v for k, v in T.items() if v}
have = {str(p.relative_to(root)) for p in root.rglob("*.py")}
mapped = {s for v in T.values() for s in v}
extra = have - mapped
print("left where they are:", sorted(extra))


def dotted(rel):
    m = "zpp_lab." + rel[:-3].replace("/", ".")
    return m.removesuffix(".__init__") if m != "zpp_lab.__init__" else "zpp_lab"


modmap, pathmap = {}, {}
for k, v in T.items():
    for s in v:
        if dotted(s) != dotted(k):
            modmap[dotted(s)] = dotted(k)
        pathmap[s] = k
PKG = {
    "zpp_lab.commands": "zpp_lab.cli",
    "zpp_lab.ops": "zpp_lab.codecs.kernels",
    "zpp_lab.tracking": "zpp_lab.runs",
    "zpp_lab.optimizers": "zpp_lab.engines.optim",
    "zpp_lab.emulate": "zpp_lab.tools.links",
    "zpp_lab.dashboard": "zpp_lab.study.wandb_pages",
    "zpp_lab.cost": "zpp_lab.tools.plan.cost",
    "zpp_lab.search": "zpp_lab.tools.plan.search",
    "zpp_lab.bench": "zpp_lab.tools.bench",
    "zpp_lab.export": "zpp_lab.tools.export",
    "zpp_lab.checkpoint": "zpp_lab.runs.checkpoint",
}
for k, v in PKG.items():
    modmap.setdefault(k, v)
CLI = modmap.pop("zpp_lab.cli", None)
names_of = {}


def renames(old):  # {name: new} for that old module
    return RENAME.get(old.removeprefix("zpp_lab."), {})


def newmod(path):  # longest prefix
    parts = path.split(".")
    for i in range(len(parts), 1, -1):
        p = ".".join(parts[:i])
        if p in modmap:
            rest = parts[i:]
            if rest and rest[0] in renames(p):
                rest[0] = renames(p)[rest[0]]
            return ".".join([modmap[p], *rest])
        if i < len(parts) and renames(p) and parts[i] in renames(p):
            return ".".join([p, renames(p)[parts[i]], *parts[i + 1 :]])
        if p in known:
            return path
    return path


known = {dotted(s) for s in have}
DOT = re.compile(r"(?<![\w.])zpp_lab((?:\.\w+)+)")
PATH = re.compile(r"(?<![\w/.])(?:zpp_lab/)?((?:\w+/)+\w+\.py)\b|(?<![\w/.])zpp_lab/(\w+\.py)\b")


def text(s, rel=None):
    s = DOT.sub(lambda m: newmod(m.group(0)), s)

    def path(m):
        whole, inner = m.group(0), m.group(1) or m.group(2)
        if inner.startswith("zpp_lab/"):
            inner = inner[8:]
        if inner in pathmap and pathmap[inner] != inner:
            return whole.replace(inner, pathmap[inner])
        return whole

    s = PATH.sub(path, s)
    if rel is not None and rel.startswith("zpp_lab/"):
        own = rel[8:]
        folder = own.rpartition("/")[0]
        newfolder = pathmap.get(own, own).rpartition("/")[0]

        def tick(m):
            n = m.group(1)
            for cand in ([f"{folder}/{n}"] if folder else []) + [n]:
                if cand in pathmap:
                    new = pathmap[cand]
                    return (
                        "`"
                        + (new.rpartition("/")[2] if new.rpartition("/")[0] == newfolder else new)
                        + "`"
                    )
            return m.group(0)

        s = re.sub(r"`(\w+\.py)`", tick, s)
    return s


import io, tokenize


def dealias(src, pairs):
    """[(alias, base or None)]: alias.x → base.x, or x where the alias is the module itself; base only where that name is free"""
    for alias, base in pairs:
        toks = list(tokenize.generate_tokens(io.StringIO(src).readline))
        if base and any(
            k.type == tokenize.NAME
            and k.string == base
            and toks[i - 1].string not in (".", "import")
            and toks[i + 1].string != "as"
            and not (toks[i + 1].string == "=" and toks[i - 1].string in "(,")
            for i, k in enumerate(toks)
        ):
            print("  .. keeps alias", alias, "for", base)
            continue
        lines = src.split("\n")
        edits = []
        for i, k in enumerate(toks):
            if k.type == tokenize.NAME and k.string == alias and toks[i - 1].string != ".":
                if toks[i + 1].string == ".":
                    edits.append((k.start, toks[i + 1].end if base is None else k.end, base or ""))
                elif base and toks[i - 1].string == "as":
                    edits.append((toks[i - 1].start, k.end, ""))
                elif base:
                    edits.append((k.start, k.end, base))
        for i, k in enumerate(toks):
            if (
                k.type == tokenize.STRING
                and re.match("(?i)r?f", k.string)
                and re.search(r"\{[^}]*\b" + alias + r"\.", k.string)
            ):
                edits.append(
                    (
                        k.start,
                        k.end,
                        re.sub(
                            r"(?<![\w.])" + alias + r"\.(?=\w+[(}\[.!:])",
                            f"{base}." if base else "",
                            k.string,
                        ),
                    )
                )
        for (r, c), (r2, e), new in sorted(edits, reverse=True):
            if r == r2:
                lines[r - 1] = lines[r - 1][:c] + new + lines[r - 1][e:]
        src = "\n".join(lines)
    return src


def importfrom(node, indent, drop=None):
    """new statements of one `from zpp_lab… import …`; drop: target whose own names need no import"""
    mod = node.module
    groups = collections.OrderedDict()
    out = []
    for a in node.names:
        full = f"{mod}.{a.name}"
        if full in modmap or full in known:
            new = modmap.get(full, full) if full != "zpp_lab.cli" else full
            pkg, _, base = new.rpartition(".")
            bound = a.asname or a.name
            groups.setdefault(pkg, []).append(base if base == bound else f"{base} as {bound}")
            if base != bound and not a.asname:
                PAIRS.append((bound, None if drop and new == drop else base))
            if drop and new == drop:
                groups[pkg].pop()
                groups = collections.OrderedDict((g, n) for g, n in groups.items() if n)
        else:
            om, on = origin(mod, a.name)
            target = CLI if om == "zpp_lab.cli" and CLI else modmap.get(om, om)
            n = renames(om).get(on, on)
            if on != a.name and not a.asname:
                n, a = on, ast.alias(on, a.name)
            if drop and target == drop:
                if a.asname and a.asname != n:
                    out.append(f"{indent}{a.asname} = {n}")
                    print("  !! alias of own name", drop, a.asname, n)
                continue
            bound = a.asname or a.name
            groups.setdefault(target, []).append(n if n == bound else f"{n} as {bound}")
    return out + [
        f"{indent}from {p} import {', '.join(ns)}"
        if len(f"{indent}from {p} import {', '.join(ns)}") < 100
        else f"{indent}from {p} import (\n"
        + "".join(f"{indent}    {n},\n" for n in ns)
        + f"{indent})"
        for p, ns in groups.items()
    ]


PAIRS = []


def rewrite(src, rel, drop=None):
    try:
        t = ast.parse(src)
    except SyntaxError:
        return text(src, rel)
    lines = src.split("\n")
    spans = []
    for node in ast.walk(t):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and (node.module + ".").startswith("zpp_lab.")
        ):
            spans.append((node.lineno - 1, node.end_lineno, node))
    spans.sort(key=lambda s: s[0])
    out, at = [], 0
    PAIRS.clear()
    for a, b, node in spans:
        if a > at:
            out.append(text("\n".join(lines[at:a]), rel))
        line = lines[a]
        indent = line[: len(line) - len(line.lstrip())]
        tail = lines[b - 1].partition("#")[2]
        if line.strip().startswith("from") or line.strip().startswith(">>>"):
            st = importfrom(node, indent, drop)
            if tail and st:
                st[-1] += "  #" + tail
            if not st and node.col_offset:
                st = [indent + "pass"]
            out += st
        else:
            out.append(text(line, rel))
            print("  !! odd import line", rel, line)
        at = b
    if at < len(lines):
        out.append(text("\n".join(lines[at:]), rel))
    s = "\n".join(out)
    return dealias(s, list(dict.fromkeys(PAIRS))) if PAIRS else s


def rename_names(src, table):
    """whole-word rename of top-level names inside one module (not attributes, not keyword arguments)"""
    if not table:
        return src
    import io, tokenize

    toks = list(tokenize.generate_tokens(io.StringIO(src).readline))
    edits = []
    for i, k in enumerate(toks):
        if k.type == tokenize.NAME and k.string in table:
            prev = toks[i - 1].string if i else ""
            nxt = toks[i + 1].string if i + 1 < len(toks) else ""
            if prev == ".":
                continue
            if nxt == "=" and prev in "(,":
                continue
            edits.append((k.start, k.end, table[k.string]))
    lines = src.split("\n")
    for (r, c), (_, e), new in reversed(edits):
        lines[r - 1] = lines[r - 1][:c] + new + lines[r - 1][e:]
    return "\n".join(lines)


FLAT = {"zpp_lab.tracking"}
# names that a module merely passes on: importers go to where they are defined
defs, passed = {}, {}
for rel in have:
    tt = ast.parse((root / rel).read_text())
    m = dotted(rel)
    defs[m] = set()
    passed[m] = {}
    for n in tt.body:
        for x in ast.walk(n) if isinstance(n, (ast.If, ast.Try)) else [n]:
            if isinstance(x, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                defs[m].add(x.name)
            elif isinstance(x, (ast.Assign, ast.AnnAssign)):
                for y in x.targets if isinstance(x, ast.Assign) else [x.target]:
                    defs[m] |= {z.id for z in ast.walk(y) if isinstance(z, ast.Name)}
            elif isinstance(x, ast.ImportFrom) and x.module and x.module.startswith("zpp_lab"):
                for a in x.names:
                    passed[m][a.asname or a.name] = (x.module, a.name)


def origin(mod, name):
    while (
        mod in defs
        and name not in defs[mod]
        and name in passed[mod]
        and f"{mod}.{name}" not in known
        and (not have_init(mod) or mod in FLAT)
    ):
        nm, nn = passed[mod][name]
        if f"{nm}.{nn}" in known:
            break
        mod, name = nm, nn
    return mod, name


def have_init(mod):
    return mod.removeprefix("zpp_lab").lstrip(".").replace(".", "/") + "/__init__.py" in have


# ---- 1. rewrite text everywhere
files = subprocess.run(
    ["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True
).stdout.split("\n")
content = {}
for f in files:
    if not f or not re.search(r"\.(py|md|toml|sh|yaml|cu|cuh|h|cpp|sbatch)$|Makefile$", f):
        continue
    if re.search(r"^experiments/.*(report\.md|study\.yaml|config\.yaml)$", f):
        continue
    p = tree / f
    if p.is_symlink():
        continue
    s = p.read_text()
    if f.startswith("zpp_lab/") and f[8:] in pathmap:
        k = pathmap[f[8:]]
        s2 = rename_names(s, renames(dotted(f[8:])))
        content[f] = rewrite(s2, f, dotted(k) if len(T[k]) > 1 else None)
    elif f.endswith(".py"):
        content[f] = rewrite(s, f)
    else:
        content[f] = text(s)
    if f == "pyproject.toml" and CLI:
        content[f] = content[f].replace("zpp_lab.cli:main", "zpp_lab.cli.main:main")


# ---- 2. merge
def parts(src):
    t = ast.parse(src)
    lines = src.split("\n")
    doc = ast.get_docstring(t, clean=False)
    at = 0
    imports, guarded = [], []
    body = list(t.body)
    if (
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        at = body[0].end_lineno
        body = body[1:]
    head = []
    last = at
    while body:
        n = body[0]
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append("\n".join(lines[last : n.end_lineno]).strip("\n"))
        elif isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test) and not n.orelse:
            guarded += [ast.unparse(x) for x in n.body if not isinstance(x, ast.Pass)]
        else:
            break
        last = n.end_lineno
        body = body[1:]
    names = {}
    for n in body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names[n.name] = "def"
        elif isinstance(n, (ast.Assign, ast.AnnAssign)):
            for x in n.targets if isinstance(n, ast.Assign) else [n.target]:
                for y in ast.walk(x):
                    if isinstance(y, ast.Name):
                        names[y.id] = "def"
    bound = {}
    for st in imports + guarded:
        for n in ast.parse(st).body:
            if isinstance(n, ast.ImportFrom):
                for a in n.names:
                    bound[a.asname or a.name] = f"{n.module}.{a.name}"
            elif isinstance(n, ast.Import):
                for a in n.names:
                    bound[a.asname or a.name.split(".")[0]] = (
                        a.name if a.asname else a.name.split(".")[0]
                    )
    return doc, imports, guarded, "\n".join(lines[last:]).strip("\n"), names, bound


out = {}
for k, v in T.items():
    if len(v) == 1:
        out[k] = content["zpp_lab/" + v[0]]
        continue
    docs, imps, guards, bodies = [], [], [], []
    seen, seenb = {}, {}
    for s in v:
        doc, i, g, b, names, bound = parts(content["zpp_lab/" + s])
        for n in names:
            if n in seen:
                print(f"  !! {k}: {n} defined in {seen[n]} and {s}")
            if n in seenb and not seenb[n][0].startswith(dotted(k) + "."):
                print(f"  !! {k}: {n} defined in {s}, imported by {seenb[n][1]} from {seenb[n][0]}")
            seen[n] = s
        for n, w in bound.items():
            if n in seenb and seenb[n][0] != w:
                print(f"  !! {k}: {n} imported as {seenb[n]} and {w} in {s}")
            if n in seen and seen[n] != s:
                print(f"  !! {k}: {n} imported in {s} from {w}, defined in {seen[n]}")
            seenb.setdefault(n, (w, s))
        if "__file__" in b:
            print(f"  !! {k}: __file__ in {s}")
        docs.append(doc or "")
        imps += [
            x for x in i if x.strip() != "from __future__ import annotations" and x not in imps
        ]
        guards += [x for x in g if x not in guards]
        bodies.append(b)
    main = max(
        range(len(v)),
        key=lambda j: (
            pathlib.PurePath(v[j]).name.removesuffix(".py").split("_")[-1]
            == pathlib.PurePath(k).stem,
            len(bodies[j]),
        ),
    )
    doc = DOC.get(k) or docs[main].strip("\n")
    rest = [d.strip("\n").strip() for j, d in enumerate(docs) if j != main and d.strip()]
    if k not in DOC:
        doc = "\n\n".join([doc.strip(), *rest]) + ("\n" if "\n" in doc or rest else "")
    text_ = f'"""{doc}"""\n\nfrom __future__ import annotations\n\n' + "\n".join(imps) + "\n"
    if guards:
        text_ += (
            "\nif TYPE_CHECKING:\n"
            + "\n".join("    " + g.replace("\n", "\n    ") for g in guards)
            + "\n"
        )
    out[k] = text_ + "\n\n" + "\n\n\n".join(bodies) + "\n"
# ---- 3. write
for g in GONE:
    if (root / g).exists():
        subprocess.run(["git", "rm", "-qf", f"zpp_lab/{g}"], cwd=tree, check=True)
        content.pop("zpp_lab/" + g, None)
for k, v in T.items():
    new = root / k
    new.parent.mkdir(parents=True, exist_ok=True)
    big = max(v, key=lambda s: (root / s).stat().st_size)
    if big != k:
        subprocess.run(
            ["git", "mv", "-f", f"zpp_lab/{big}", f"zpp_lab/{k}.moving"], cwd=tree, check=True
        )
    for s in v:
        if s != big:
            subprocess.run(["git", "rm", "-qf", "--cached", f"zpp_lab/{s}"], cwd=tree, check=True)
            (root / s).unlink(missing_ok=True)
for k, v in T.items():
    p = root / (k + ".moving")
    if p.exists():
        subprocess.run(
            ["git", "mv", "-f", f"zpp_lab/{k}.moving", f"zpp_lab/{k}"], cwd=tree, check=True
        )
    (root / k).write_text(out[k].rstrip("\n") + "\n")
for f, s in content.items():
    if not (f.startswith("zpp_lab/") and f[8:] in pathmap):
        (tree / f).write_text(s)
for d in sorted({(root / k).parent for k in T}):
    init = d / "__init__.py"
    if not init.exists():
        init.write_text('"""' + INIT.get(str(d.relative_to(root)), d.name) + '"""\n')
m = root / "cli/__main__.py"
if CLI and not m.exists():
    m.write_text(
        '"""`python -m zpp_lab.cli`: the console script without its installation."""\n\nimport sys\n\nfrom zpp_lab.cli.main import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n'
    )
for d in sorted(root.rglob("*"), reverse=True):
    if d.is_dir() and not any(
        x for x in d.rglob("*") if x.is_file() and "__pycache__" not in str(x)
    ):
        subprocess.run(["rm", "-rf", str(d)])
subprocess.run(["git", "add", "-A", "zpp_lab"], cwd=tree)
