"""A study's report: tables, figures and words, each from the judged study."""
