"""Run inside a pod that has the job's secret: `complete.py URL BODY` prints what the served model's API answers."""

import pathlib
import sys
import urllib.request

from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

SECRET = pathlib.Path("/run/megatronapp/secret/secret")


def main() -> None:
    url, body = sys.argv[1:]
    headers = {
        "Authorization": f"Bearer {derive_token(read_secret(SECRET), TokenRole.SERVE)}",
        "Content-Type": "application/json",
    }
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        print(answer.read().decode())


if __name__ == "__main__":
    main()
