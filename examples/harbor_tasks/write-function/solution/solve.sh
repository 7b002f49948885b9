#!/bin/bash
set -e
cat > text_tools.py <<'END'
def title(text):
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))


def initials(text):
    return "".join(word[0].upper() for word in text.split())
END
