// CoreDNS with the plugins a cluster without an internet needs, and no cloud SDK.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order is the order in which a query passes through the plugins.
	dnsserver.Directives = []string{"health", "ready", "errors", "cache", "kubernetes", "forward"}
	coremain.Run()
}
