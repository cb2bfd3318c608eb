"""Choice of what forward ranks ship, and advice on the numbers of both roles, by measured times."""
