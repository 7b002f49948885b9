from slugs import slugify


def test_words_are_joined() -> None:
    assert slugify("Hello World") == "hello-world"


def test_accents_are_dropped() -> None:
    assert slugify("Crème Brûlée") == "creme-brulee"


def test_digits_stay() -> None:
    assert slugify("Chapter 7") == "chapter-7"


def test_a_long_title_is_cut_at_a_word() -> None:
    assert slugify("one two three four", longest=12) == "one-two"
