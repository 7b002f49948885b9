"""Atropos environments: a task in, a scored group out. The only package that imports atroposlib."""
