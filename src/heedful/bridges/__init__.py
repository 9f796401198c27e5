"""The rooms that name other people's frameworks; each is imported where it is used."""
