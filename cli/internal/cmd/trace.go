package cmd

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/trace"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// jaegerEnv is the environment variable of --jaeger-address, and defaultJaeger the address without both.
const (
	jaegerEnv     = "FSB_JAEGER_ADDRESS"
	defaultJaeger = "http://127.0.0.1:16686"
)

// traceOptions are the flags of `trace`.
type traceOptions struct {
	address, id string
	cluster     clusterOptions
}

// spanJSON is a span as `trace -o json` prints it.
type spanJSON struct {
	ID        string    `json:"id"`
	Parent    string    `json:"parent,omitempty"`
	Service   string    `json:"service"`
	Name      string    `json:"name"`
	StartTime time.Time `json:"startTime"`
	Duration  string    `json:"duration"`
	Error     string    `json:"error,omitempty"`
}

// traceJSON is a trace as `trace -o json` prints it.
type traceJSON struct {
	TraceID string     `json:"traceID"`
	Call    string     `json:"call,omitempty"`
	Spans   []spanJSON `json:"spans"`
}

func newTrace(c *cli) *cobra.Command {
	o := &traceOptions{}
	cmd := &cobra.Command{
		Use:   "trace NAME | --trace-id ID",
		Short: "Show the spans of a sandbox",
		Long: `Show the spans of the call that created a sandbox, and of the call that deletes it, as a tree with times.

The ids of the traces are on the custom resource, which is read with the kubeconfig of kubectl. The spans come from the query
API of Jaeger. "make trace" starts a Jaeger beside the local cluster. With --trace-id the custom resource is not needed:
"fsb-ctl -v" prints the id of each command.`,
		Example: `  fsb-ctl trace web
  fsb-ctl trace web --jaeger-address http://jaeger.example:16686
  fsb-ctl trace --trace-id 4bf92f3577b34da6a3ce929d0e0e4736 -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if o.id == "" {
				return exactly("NAME")(nil, args)
			}
			if len(args) > 0 {
				return usagef("NAME and --trace-id are mutually exclusive")
			}
			return nil
		},
		ValidArgsFunction: c.completeSandbox,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), c, args) },
	}
	cmd.Flags().StringVar(&o.address, "jaeger-address", "", "`URL` of Jaeger's query API [$"+jaegerEnv+"] (default "+defaultJaeger+")")
	cmd.Flags().StringVar(&o.id, "trace-id", "", "`id` of the trace, instead of NAME")
	_ = cmd.RegisterFlagCompletionFunc("jaeger-address", cobra.NoFileCompletions)
	_ = cmd.RegisterFlagCompletionFunc("trace-id", cobra.NoFileCompletions)
	o.cluster.addFlags(cmd, cmd.Flags())
	return cmd
}

func (o *traceOptions) run(ctx context.Context, c *cli, args []string) error {
	traces := []traceJSON{{TraceID: o.id}}
	if o.id == "" {
		var err error
		if traces, err = o.tracesOf(ctx, c, args[0]); err != nil {
			return err
		}
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	defer transport.CloseIdleConnections()
	client := jaeger.New(cmp.Or(o.address, c.Getenv(jaegerEnv), defaultJaeger), &http.Client{Transport: transport})
	all := make([][]jaeger.Span, len(traces))
	for i := range traces {
		spans, err := call(ctx, c, "reading trace "+traces[i].TraceID, func(ctx context.Context) ([]jaeger.Span, error) {
			return client.Trace(ctx, traces[i].TraceID)
		})
		if err != nil {
			return err
		}
		all[i], traces[i].Spans = spans, spansJSON(spans)
	}
	return printTraces(c, traces, all)
}

// tracesOf returns the traces that the custom resource of a sandbox refers to.
func (o *traceOptions) tracesOf(ctx context.Context, c *cli, name string) ([]traceJSON, error) {
	cluster, err := o.cluster.open(c)
	if err != nil {
		return nil, err
	}
	s, err := getResource(ctx, c, cluster, name)
	if err != nil {
		return nil, err
	}
	var out []traceJSON
	for _, t := range []struct{ call, annotation string }{
		{"create", v1alpha1.AnnotationTraceparent}, {"delete", v1alpha1.AnnotationDeleteTraceparent},
	} {
		if id := traceID(s.Annotations[t.annotation]); id != "" {
			out = append(out, traceJSON{TraceID: id, Call: t.call})
		}
	}
	if len(out) == 0 {
		return nil, fault.New(errdefs.ErrNotFound, reasonNoTrace, "sandbox %q has no trace: no call that created it carried one", name)
	}
	return out, nil
}

// traceID returns the trace id of a W3C traceparent; "" if it is not valid.
func traceID(traceparent string) string {
	fields := strings.Split(traceparent, "-")
	if len(fields) != 4 {
		return ""
	}
	id, err := trace.TraceIDFromHex(fields[1])
	if err != nil {
		return ""
	}
	return id.String()
}

func spansJSON(spans []jaeger.Span) []spanJSON {
	out := make([]spanJSON, len(spans))
	for i, s := range spans {
		out[i] = spanJSON{s.ID, s.Parent, s.Service, s.Name, s.Start.UTC(), s.Duration.String(), s.Error}
	}
	return out
}

// printTraces prints traces. The tables have a title if there are several.
func printTraces(c *cli, traces []traceJSON, all [][]jaeger.Span) error {
	switch c.settings.Output {
	case "json", "yaml":
		raw, err := json.MarshalIndent(map[string]any{"traces": traces}, "", "  ")
		if err != nil {
			return fmt.Errorf("writing JSON: %w", err)
		}
		return c.printJSON(append(raw, '\n'))
	case "name":
		for _, t := range traces {
			if err := c.printNames("trace", t.TraceID); err != nil {
				return err
			}
		}
		return nil
	}
	for i, spans := range all {
		if len(all) > 1 {
			if _, err := fmt.Fprintf(c.Out, "%s (trace %s)\n", traces[i].Call, traces[i].TraceID); err != nil {
				return err
			}
		}
		if err := render.Trace(spans).Flush(c.Out); err != nil {
			return err
		}
	}
	return nil
}

// getResource returns the custom resource of a sandbox.
func getResource(ctx context.Context, c *cli, cluster Cluster, name string) (*v1alpha1.Sandbox, error) {
	s, err := call(ctx, c, "getting "+name, func(ctx context.Context) (*v1alpha1.Sandbox, error) {
		return cluster.Sandbox(ctx, c.settings.Namespace, name)
	})
	if errdefs.IsNotFound(err) {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no custom resource for sandbox %s/%s", c.settings.Namespace, name)
	}
	return s, err
}
