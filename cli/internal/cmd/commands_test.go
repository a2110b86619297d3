package cmd_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// commands are the commands that do something, with arguments that are valid but for what a test adds.
var commands = []string{ //nolint:gochecknoglobals // a constant
	"run --image x", "ps a", "attach a", "kill a 7", "cp a b:c", "port-forward a :80", "get a", "list", "describe a", "logs a", "trace a", "watch", "update a --reset", "delete a", "pool list", "pool get p", "agents",
	"image list", "image pull x", "janitor verdicts", "janitor sweep", "gc explain pod/a", "gc preview pod/a", "gc graph pod/a", "gc watch",
	"gc status", "config view", "version",
}

// TestEveryCommandChecksItsInput adds to each command what none accepts. Nothing is called, and nothing is written to the output.
func TestEveryCommandChecksItsInput(t *testing.T) {
	b := start(t, &fake{})
	for _, line := range commands {
		path := strings.Fields(line)
		for name, tc := range map[string]struct{ added, want string }{
			"unknown flag":     {"--frob", "unknown flag: --frob"},
			"unknown format":   {"--output=xml", `output is "xml"`},
			"no value":         {"--namespace", "flag needs an argument: --namespace"},
			"invalid duration": {"--timeout=soon", `invalid argument "soon" for "--timeout" flag`},
			"no time":          {"--timeout=0s", "timeout is"},
			"invalid switch":   {"--insecure=perhaps", `invalid argument "perhaps" for "--insecure" flag`},
			"no such file":     {"--config=/nonexistent", "reading configuration"},
		} {
			t.Run(line+": "+name, func(t *testing.T) {
				r := b.run(t, append(append([]string{}, path...), tc.added)...)
				require.Equal(t, 2, r.code, r.err)
				require.Contains(t, r.err, tc.want)
				require.Regexp(t, `^error: [^\n]+\nhint: fsb-ctl.* --help\n$`, r.err)
				require.Empty(t, r.out)
			})
		}
	}
}

// TestEveryCommandChecksItsArguments gives each command one argument too many.
func TestEveryCommandChecksItsArguments(t *testing.T) {
	b := start(t, &fake{})
	for _, line := range []string{
		"get a b", "list b", "describe a b", "logs a b", "trace a b", "update a b --reset", "pool list b", "pool get p b", "agents b",
		"image list b", "image pull x b", "janitor verdicts b", "gc explain pod a b", "gc preview pod a b", "gc graph pod a b",
		"gc watch b", "gc status b", "config view b", "version b",
	} {
		t.Run(line, func(t *testing.T) {
			r := b.run(t, strings.Fields(line)...)
			require.Equal(t, 2, r.code, r.err)
			require.Contains(t, r.err, `unexpected argument "b"`)
			require.Empty(t, r.out)
		})
	}
}

// TestFormats prints each kind of object in each format: JSON and YAML have the same content, and each name has its kind.
func TestFormats(t *testing.T) {
	f := mesh()
	f.images = func(context.Context, *allocatorv1.ListImagesRequest) (*allocatorv1.ListImagesResponse, error) {
		return &allocatorv1.ListImagesResponse{Images: []*allocatorv1.PoolImage{{Image: "docker.io/library/busybox:1"}}}, nil
	}
	b := start(t, f)
	for line, tc := range map[string]struct {
		header string   // of the table
		wide   string   // a column of the wide table that the narrow one lacks
		names  []string // -o name
		keys   []string // of the JSON object
	}{
		"list":             {"NAME ", "IMAGE", []string{"sandbox/web", "sandbox/a-longer-name"}, []string{"sandboxes"}},
		"get web":          {"NAME ", "IMAGE", []string{"sandbox/web"}, []string{"createTime", "labels", "name", "namespace", "spec", "status", "uid"}},
		"pool list":        {"NAME ", "RUNTIME", []string{"sandboxpool/default", "sandboxpool/off"}, []string{"pools"}},
		"pool get default": {"NAME ", "RUNTIME", []string{"sandboxpool/default"}, nil},
		"agents":           {"NAME ", "RUNTIME", []string{"pod/agent-1", "pod/agent-2"}, []string{"agents"}},
		"image list":       {"IMAGE ", "PRESENT", []string{"image/docker.io/library/busybox:1"}, []string{"images"}},
	} {
		t.Run(line, func(t *testing.T) {
			printed := func(format string) string {
				r := b.run(t, append(strings.Fields(line), "-o", format)...)
				require.Zero(t, r.code, r.err)
				require.True(t, strings.HasSuffix(r.out, "\n"))
				return r.out
			}
			require.True(t, strings.HasPrefix(printed("table"), tc.header))
			require.NotContains(t, printed("table"), tc.wide)
			require.Contains(t, printed("wide"), tc.wide)
			require.Equal(t, strings.Join(tc.names, "\n")+"\n", printed("name"))
			var object map[string]any
			require.NoError(t, json.Unmarshal([]byte(printed("json")), &object))
			for _, key := range tc.keys {
				require.Contains(t, object, key)
			}
			fromYAML, err := yaml.YAMLToJSON([]byte(printed("yaml")))
			require.NoError(t, err)
			require.JSONEq(t, printed("json"), string(fromYAML))
		})
	}
}

// TestFormatsOfGC does the same for the garbage collector, which has the format dot for graphs alone.
func TestFormatsOfGC(t *testing.T) {
	c := &collector{
		explained: &gcv1.ExplainObjectResponse{Object: thing("Pod", "a"), State: gcv1.State_STATE_FREE},
		graph:     &gcv1.GetGraphResponse{Vertices: []*gcv1.Vertex{{Object: thing("Pod", "a"), State: gcv1.State_STATE_FREE}}, Dot: "digraph owners {}\n"},
	}
	b, _ := withCollectors(t, map[string]*collector{"gc-1": c}, "gc-1")
	for line, text := range map[string]string{"gc explain pod/a": "Pod default/a: Free, it has no owner", "gc graph pod/a": "DISTANCE   OBJECT"} {
		r := b.run(t, strings.Fields(line)...)
		require.Zero(t, r.code, r.err)
		require.Contains(t, r.out, text)
		r = b.run(t, strings.Fields(line+" -o json")...)
		require.Zero(t, r.code, r.err)
		require.True(t, json.Valid([]byte(r.out)), r.out)
		y := b.run(t, strings.Fields(line+" -o yaml")...)
		require.Zero(t, y.code, y.err)
		fromYAML, err := yaml.YAMLToJSON([]byte(y.out))
		require.NoError(t, err)
		require.JSONEq(t, r.out, string(fromYAML))
	}
	r := b.run(t, "gc", "graph", "pod/a", "-o", "dot")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "digraph owners {}\n", r.out)
	require.True(t, c.graphs[len(c.graphs)-1].GetDot())
	r = b.run(t, "list", "-o", "dot")
	require.Equal(t, 2, r.code, "a list is no graph: %s", r.out)
}
