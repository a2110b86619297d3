package follow

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

// read splits a text that arrives in some way.
func read(source io.Reader) (items []string, version string, err error) {
	meta, err := split(source, func(item []byte) error {
		stripped, err := strip(item)
		items = append(items, string(stripped))
		return err
	})
	return items, meta.ResourceVersion, err
}

func TestSplit(t *testing.T) {
	const meta = `"metadata":{"resourceVersion":"7"}`
	for name, test := range map[string]struct {
		in      string
		items   []string
		problem string
	}{
		"as the API server writes it": {`{"apiVersion":"v1","items":[{"a":1},{"b":[{}]}],"kind":"List",` + meta + `}`, []string{`{"a":1}`, `{"b":[{}]}`}, ""},
		"for people":                  {"{\n  " + meta + " ,\n  \"items\" : [\n { \"a\" : 1 } ,\n 2 ]\n}\n", []string{`{ "a" : 1 }`, `2`}, ""},
		"no items":                    {`{"items":[],` + meta + `}`, nil, ""},
		"null":                        {`{"items":null,` + meta + `}`, nil, ""},
		"none":                        {`{` + meta + `}`, nil, ""},
		"brackets in texts":           {`{"items":[{"a":"]}\"\\"},"\\\"{"],` + meta + `}`, []string{`{"a":"]}\"\\"}`, `"\\\"{"`}, ""},
		"managed fields":              {`{"items":[{"metadata":{"managedFields":[{"x":{"managedFields":1}}],"name":"n"},"managedFields":2}],` + meta + `}`, []string{`{"metadata":{"managedFields":null,"name":"n"},"managedFields":2}`}, ""},
		"only managed fields":         {`{"items":[{"metadata":{"managedFields":[1,2]}}],` + meta + `}`, []string{`{"metadata":{"managedFields":null}}`}, ""},
		"without metadata":            {`{"items":[]}`, nil, "without metadata"},
		"cut off":                     {`{"items":[{"a":1},{"b"`, []string{`{"a":1}`}, "unexpected EOF"},
		"cut off after the items":     {`{"items":[{"a":1}]`, []string{`{"a":1}`}, "unexpected EOF"},
		"nothing":                     {"", nil, "unexpected EOF"},
		"another type":                {"[]", nil, "invalid JSON"},
		"items of another type":       {`{"items":{},` + meta + `}`, nil, "invalid JSON"},
		"no comma":                    {`{"items":[1 2],` + meta + `}`, []string{"1"}, "invalid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			for how, reader := range map[string]io.Reader{"at once": strings.NewReader(test.in), "slowly": iotest.OneByteReader(strings.NewReader(test.in))} {
				items, version, err := read(reader)
				require.Equal(t, test.items, items, how)
				if test.problem != "" {
					require.ErrorContains(t, err, test.problem, how)
					continue
				}
				require.NoError(t, err, how)
				require.Equal(t, "7", version, how)
			}
		})
	}
	_, _, err := read(io.MultiReader(strings.NewReader(`{"items":[`), iotest.ErrReader(io.ErrClosedPipe)))
	require.ErrorIs(t, err, io.ErrClosedPipe)
}

// FuzzSplit: of every list that encoding/json reads, split reads the same; and it ends for every text.
func FuzzSplit(f *testing.F) {
	for _, seed := range []string{`{"items":[{"a":"\""},null,[1]],"metadata":{"resourceVersion":"1"}}`, `{"metadata":{}}`, `{"items":[{"metadata":{"managedFields":[1]}}],"metadata":{}}`, `{`, `{"items":[`, "\"\\"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		items, _, err := read(bytes.NewReader(in))
		var want struct {
			Items    []json.RawMessage `json:"items"`
			Metadata *struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
		}
		members := map[string]json.RawMessage{}
		if json.Unmarshal(in, &members) != nil || json.Unmarshal(in, &want) != nil || want.Metadata == nil || len(members["items"]) == 0 ||
			bytes.Count(in, []byte("items")) != 1 || bytes.Count(in, []byte("metadata")) != 1 || bytes.Contains(bytes.ToLower(in), []byte("managedfields")) ||
			bytes.Contains(in, []byte(`\u`)) || members["metadata"] == nil {
			return
		}
		if err != nil { // the rest of the metadata may be of other types
			return
		}
		require.Len(t, items, len(want.Items))
		for i, item := range items {
			require.Equal(t, string(want.Items[i]), item)
		}
	})
}
