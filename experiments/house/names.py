# ruff: noqa
"""First part of move.sh: names that stand in the wrong module move to another, with their importers."""

import ast, sys, pathlib, re, subprocess

tree = pathlib.Path(__file__).resolve().parents[2]
from rooms import MOVED  # [(old module file, [names], new module file)]

root = tree / "zpp_lab"


def dot(rel):
    return ("zpp_lab." + rel[:-3].replace("/", ".")).removesuffix(".__init__")


def bound(t):
    out = {}
    for n in ast.walk(t):
        if isinstance(n, ast.ImportFrom) and n.col_offset == 0:
            for a in n.names:
                out[a.asname or a.name] = f"from {n.module} import {a.name}" + (
                    f" as {a.asname}" if a.asname else ""
                )
        elif isinstance(n, ast.Import) and n.col_offset == 0:
            for a in n.names:
                out[a.asname or a.name.split(".")[0]] = f"import {a.name}" + (
                    f" as {a.asname}" if a.asname else ""
                )
    return out


def defs(t):
    out = set()
    for n in t.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
            out.add(n.name)
        elif isinstance(n, (ast.Assign, ast.AnnAssign)):
            for x in n.targets if isinstance(n, ast.Assign) else [n.target]:
                out |= {y.id for y in ast.walk(x) if isinstance(y, ast.Name)}
    return out


def span(n, lines):
    a = min([n.lineno] + [d.lineno for d in getattr(n, "decorator_list", [])]) - 1
    while a > 0 and lines[a - 1].startswith("#"):
        a -= 1
    return a, n.end_lineno


files = [
    f
    for f in subprocess.run(
        ["git", "ls-files", "*.py"], cwd=tree, capture_output=True, text=True
    ).stdout.split()
    if (tree / f).exists()
]
for A, names, B in MOVED:
    pa, pb = root / A, root / B
    if not pa.exists():
        print("no", A)
        continue
    sa, sb = pa.read_text(), pb.read_text()
    ta, tb = ast.parse(sa), ast.parse(sb)
    la = sa.split("\n")
    take = []
    for n in ta.body:
        ids = (
            {n.name}
            if isinstance(n, (ast.FunctionDef, ast.ClassDef))
            else {
                y.id
                for x in (
                    n.targets
                    if isinstance(n, ast.Assign)
                    else [n.target]
                    if isinstance(n, ast.AnnAssign)
                    else []
                )
                for y in ast.walk(x)
                if isinstance(y, ast.Name)
            }
        )
        if ids & set(names):
            take.append((span(n, la), n))
    got = (
        set().union(
            *[
                {n.name}
                if hasattr(n, "name")
                else {
                    y.id
                    for x in (n.targets if isinstance(n, ast.Assign) else [n.target])
                    for y in ast.walk(x)
                    if isinstance(y, ast.Name)
                }
                for _, n in take
            ]
        )
        if take
        else set()
    )
    if set(names) - got:
        print("!! missing", A, set(names) - got)
    code = "\n\n\n".join("\n".join(la[a:b]) for (a, b), _ in take)
    used = {x.id for _, n in take for x in ast.walk(n) if isinstance(x, ast.Name)} | set(
        re.findall(r"\b[A-Za-z_]\w*\b", " ".join(re.findall(r'"[^"\n]*"', code)))
    )
    ba, da = bound(ta), defs(ta)
    need = [ba[u] for u in sorted(used) if u in ba and u not in bound(tb) and u not in defs(tb)]
    need += [
        f"from {dot(A)} import {u}"
        for u in sorted(used)
        if u in da and u not in got and u not in ba
    ]
    for (a, b), _ in sorted(take, key=lambda x: -x[0][0]):
        del la[a:b]
    sa2 = "\n".join(la)
    rest = {x.id for x in ast.walk(ast.parse(sa2)) if isinstance(x, ast.Name)}

    def addimports(s, imps):
        t = ast.parse(s)
        lines = s.split("\n")
        at = 0
        for n in t.body:
            if isinstance(n, (ast.Import, ast.ImportFrom)) or (
                isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
            ):
                at = n.end_lineno
            else:
                break
        return "\n".join(lines[:at] + imps + lines[at:])

    back = [f"from {dot(B)} import {n}" for n in sorted(got & rest)]
    pa.write_text(addimports(sa2, back) if back else sa2)
    sb = re.sub(rf"^from {re.escape(dot(A))} import .*\n", lambda m: m.group(0), sb, flags=re.M)
    sb2 = addimports(sb, need)
    sb2 = sb2.rstrip("\n") + "\n\n\n" + code + "\n"
    pb.write_text(sb2)
    for f in files:
        p = tree / f
        if not p.exists():
            continue
        s = p.read_text()
        if dot(A) not in s:
            continue
        t = ast.parse(s)
        lines = s.split("\n")
        ch = []
        for n in ast.walk(t):
            if (
                isinstance(n, ast.ImportFrom)
                and n.module == dot(A)
                and {a.name for a in n.names} & got
            ):
                mine = [a for a in n.names if a.name in got]
                keep = [a for a in n.names if a.name not in got]
                ind = lines[n.lineno - 1][
                    : len(lines[n.lineno - 1]) - len(lines[n.lineno - 1].lstrip())
                ]
                f1 = lambda m, aa: (
                    f"{ind}from {m} import "
                    + ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in aa)
                )
                new = ([f1(dot(A), keep)] if keep else []) + (
                    [f1(dot(B), mine)]
                    if dot(B)
                    != ("zpp_lab." + f[8:-3].replace("/", ".") if f.startswith("zpp_lab/") else "")
                    else []
                )
                ch.append((n.lineno - 1, n.end_lineno, new))
        for a, b, new in sorted(ch, reverse=True):
            lines[a:b] = new
        s2 = "\n".join(lines)
        for g in got:
            s2 = re.sub(rf"{re.escape(dot(A))}\.{g}\b", f"{dot(B)}.{g}", s2)
        if s2 != s:
            p.write_text(s2)
