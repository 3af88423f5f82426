"""Whether a server in this container answers: `healthy.py URL [CA.pem]`, status 0 if it does. For HEALTHCHECK."""

import ssl
import sys
import urllib.request


def main(url: str, authority: str = "") -> int:
    """Ask once; no certificate is shown, so only what is open to everybody can be asked."""
    context = ssl.create_default_context(cafile=authority) if authority else None
    try:
        with urllib.request.urlopen(url, timeout=4, context=context) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
