package obs

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// LatencyBuckets are the histogram buckets, in seconds, of all operations on or near the fast path: 0.5 ms to 65 s.
var LatencyBuckets = prometheus.ExponentialBuckets(0.0005, 2, 18)

// NewRegistry returns a registry with the metrics of the process and of the Go runtime.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector())
	return r
}

// ServeMetrics serves /metrics on a listener, which it closes, and with profiling the profiles of net/http/pprof at /debug/pprof/, with
// TLS unless its configuration is nil. It blocks until ctx ends. Without a listener it serves nothing.
func ServeMetrics(ctx context.Context, listener net.Listener, g prometheus.Gatherer, profiling bool, secure *tls.Config) error {
	if listener == nil {
		<-ctx.Done()
		return nil
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{}))
	if profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index) // by name: heap, goroutine ...
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	server := &http.Server{
		Handler: mux, TLSConfig: secure, BaseContext: func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
	}
	done := make(chan error, 1)
	go func() {
		if secure == nil {
			done <- server.Serve(listener)
			return
		}
		done <- server.ServeTLS(listener, "", "")
	}()
	select {
	case err := <-done:
		return fmt.Errorf("serving metrics: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(stop); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("stopping metrics: %w", err)
	}
	_ = <-done
	return nil
}
