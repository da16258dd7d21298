"""Where requests come from, besides RabbitMQ; one file a transport."""
