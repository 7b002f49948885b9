"""The slot helper in Python, for places without a C compiler: same messages, same isolation, slower and larger."""
