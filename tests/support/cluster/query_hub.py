"""Program for a hub's pod: `query_hub.py PATH` prints what the hub answers to a client with the job's secret."""

import pathlib
import sys
import urllib.request

from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

SECRET = pathlib.Path("/run/megatronapp/secret/secret")


def main() -> None:
    token = derive_token(read_secret(SECRET), TokenRole.VIEWER)
    request = urllib.request.Request(
        f"http://127.0.0.1:8080{sys.argv[1]}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as answer:
        print(answer.read().decode())


if __name__ == "__main__":
    main()
