package plan_test

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
)

// options returns the documented options by field.
func options(t *testing.T) map[string]plan.Option {
	t.Helper()
	out := map[string]plan.Option{}
	for _, o := range plan.Options() {
		require.NotContains(t, out, o.Field)
		out[o.Field] = o
	}
	return out
}

// walk calls f with every field of a struct, by its path in JSON. What f returns true for is walked, too: its elements, if it is a list.
func walk(prefix string, v reflect.Value, f func(path string, v reflect.Value) bool) {
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		path, field := prefix+name, v.Field(i)
		if kind := field.Type(); kind.Kind() == reflect.Slice && kind.Elem().Kind() == reflect.Struct {
			path += "[]"
		}
		if !f(path, field) {
			continue
		}
		for field.Kind() == reflect.Pointer || field.Kind() == reflect.Slice {
			if field.Kind() == reflect.Pointer {
				field = field.Elem()
			} else {
				field = field.Index(0)
			}
		}
		walk(path+".", field, f)
	}
}

// rowOf returns the option of a field. A list that is one option has its name without brackets.
func rowOf(rows map[string]plan.Option, path string) (plan.Option, bool) {
	if o, ok := rows[path]; ok {
		return o, true
	}
	o, ok := rows[strings.TrimSuffix(path, "[]")]
	return o, ok
}

// set gives a value that is not the zero one.
func set(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("1")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("a"), reflect.Zero(v.Type().Elem()))
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	default:
		panic(v.Kind().String())
	}
}

// TestOptions: every option of the OCI spec is documented, and one that is documented as refused is. An option of a later version of the spec
// fails the test until it is.
func TestOptions(t *testing.T) {
	rows, seen := options(t), map[string]bool{}
	walk("", reflect.ValueOf(valid()).Elem(), func(path string, _ reflect.Value) bool {
		o, ok := rowOf(rows, path)
		require.True(t, ok, "the option %s is not documented", path)
		seen[o.Field] = true
		return o.Support == plan.Parts
	})
	for field, o := range rows {
		require.True(t, seen[field], "the spec has no option %s", field)
		if o.Support != plan.Refused {
			continue
		}
		s := valid()
		walk("", reflect.ValueOf(s).Elem(), func(path string, v reflect.Value) bool {
			row, _ := rowOf(rows, path)
			if row.Field == field {
				set(v)
			}
			return row.Support == plan.Parts
		})
		_, err := parse(t, s)
		require.True(t, errdefs.IsInvalidArgument(err), "%s: %v", field, err)
		require.ErrorContains(t, err, "does not support", field)
	}
}

// TestBindOptions: an option that a bind mount would not have is refused.
func TestBindOptions(t *testing.T) {
	for _, option := range []string{"noatime", "idmap", "rshared", "rro", ""} {
		s := valid()
		s.Mounts[3].Options = append(s.Mounts[3].Options, option)
		_, err := parse(t, s)
		require.True(t, errdefs.IsInvalidArgument(err), "%q: %v", option, err)
	}
	s := valid()
	s.Linux.Resources = &specs.LinuxResources{}
	_, err := parse(t, s)
	require.NoError(t, err, "no limits at all")
}

// TestOptionsDocument compares the document with this package.
func TestOptionsDocument(t *testing.T) {
	raw, err := os.ReadFile("../../../../docs/runtime.md")
	require.NoError(t, err)
	const begin, end = "<!-- options -->\n\n", "\n<!-- /options -->"
	_, after, ok := strings.Cut(string(raw), begin)
	require.True(t, ok)
	got, _, ok := strings.Cut(after, end)
	require.True(t, ok)
	var want strings.Builder
	want.WriteString("| option | support | note |\n|---|---|---|\n")
	for _, o := range plan.Options() {
		if o.Support == plan.Parts && o.Note == "" {
			continue
		}
		fmt.Fprintf(&want, "| `%s` | %s | %s |\n", o.Field, o.Support, o.Note)
	}
	require.Equal(t, want.String(), got, "replace the table by this:\n%s", want.String())
}
