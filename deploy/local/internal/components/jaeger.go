package components

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

// jaegerHealth is the port of Jaeger's health check.
const jaegerHealth = 14269

// OTLPEndpoint is where Fast Sandbox and containerd send their spans by OTLP over HTTP. Without a collector there they are dropped.
func OTLPEndpoint() string { return "http://" + network.NodeIP + ":4318" }

// JaegerURL is the address of Jaeger's query API.
func JaegerURL() string { return "http://" + network.NodeIP + ":16686" }

// JaegerBinary is the trace store's program. It has a module of its own, and only `make trace` builds it.
func (c Config) JaegerBinary() string { return filepath.Join(c.BinDir, "jaeger", "all-in-one") }

// jaeger keeps the newest traces in memory and answers queries at JaegerURL.
func jaeger(c Config) Component {
	return Component{
		Name: Jaeger, Path: c.JaegerBinary(), Grace: 3 * time.Second,
		Probe: Probe{URL: fmt.Sprintf("http://127.0.0.1:%d/", jaegerHealth)},
		Args: []string{
			"--memory.max-traces=20000",
			"--collector.otlp.enabled=true",
			"--collector.otlp.http.host-port=" + network.NodeIP + ":4318",
			"--collector.otlp.grpc.host-port=" + network.NodeIP + ":4317",
			"--query.http-server.host-port=" + network.NodeIP + ":16686",
			"--query.grpc-server.host-port=" + network.NodeIP + ":16685",
			fmt.Sprintf("--admin.http.host-port=127.0.0.1:%d", jaegerHealth),
			"--log-level=warn",
		},
		// No spans of Jaeger's own.
		Env: []string{"OTEL_TRACES_SAMPLER=always_off"},
	}
}
