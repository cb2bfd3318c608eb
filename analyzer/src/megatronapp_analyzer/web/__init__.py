"""Models, roles and error answers of the HTTP interfaces of hub and MegaScope; knows neither."""
