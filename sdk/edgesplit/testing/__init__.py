"""What tests of edgesplit and of programs that use it need: `edgesplit.link_emulation` shapes a link without root."""
