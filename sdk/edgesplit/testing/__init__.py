"""What tests of edgesplit and of programs that use it need: `edgesplit.testing.link` shapes a link without root."""
