"""What holds for every failure of a command."""


def one_line(told):
    """What went wrong, after the checks that hold for every failure."""
    code, out, err = told
    assert (code, out) == (2, "")
    assert err.startswith("heedful: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err
