"""Identity and rights of callers: credentials of a request, logins of browsers, reviews by the cluster."""
